"""Model folders and names on the Hugging Face Hub: config.json and weights by path."""

from __future__ import annotations

import json
import re
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

from megadapo.errors import DataError

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""Pattern of a Hub name, ORGANISATION/NAME."""
SMALL_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "LICENSE*")
"""Files of a model on the Hub that an export copies, its weights left out."""


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a model's folder."""
    return read_json(folder / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; a DataError names a file that has none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} does not hold a JSON object")
    return value


def find_hf_config(path: str, *, key: str = "model.path") -> dict[str, Any]:
    """Return a model's configuration, without a download; raise DataError if it is not here.

    For a few published models that are not on this machine, it comes from megadapo, which ships the
    size keys of their config.json files. `path`: a folder, a name on the Hub, or the model's path
    on another machine.
    """
    folder = Path(path) if Path(path).is_dir() else None
    if folder is None and is_hub_name(path):
        folder = cached_hub_folder(path)
    name = Path(path).name
    if folder is None and name in published_models():
        folder = Path(str(files(__package__) / "configs" / name))
    if folder is None:
        raise DataError(
            f"{key} = {path!r}: there is no such folder, and megadapo ships only the "
            f"configurations of {', '.join(published_models())}; copy the model's config.json "
            "into a folder and pass that folder"
        )
    return read_hf_config(folder)


def published_models() -> tuple[str, ...]:
    """Return the names, without organisation, of the models with a shipped configuration."""
    folder = files(__package__) / "configs"
    return tuple(sorted(entry.name for entry in folder.iterdir()))


def cached_hub_folder(name: str) -> Path | None:
    """Return the folder of a Hub model's config.json in the Hub's cache; None: not cached."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def path_from_anywhere(path: str) -> str:
    """Return a path that is valid in any working directory; a Hub name stays as it is."""
    return str(Path(path).absolute()) if Path(path).is_dir() else path


def is_hub_name(text: str) -> bool:
    """Return whether a path that does not exist here can be a Hub name, ORGANISATION/NAME."""
    return HUB_NAME.fullmatch(text) is not None and not Path(text).parent.is_dir()


def copy_small_files(model: Path, folder: Path) -> None:
    """Copy configuration and tokenizer of a model's folder, unless `folder` exists."""
    if not model.is_dir() or folder.exists():
        return
    partial = folder.with_name(f"{folder.name}.part")
    partial.mkdir(exist_ok=True)
    for path in (path for pattern in SMALL_FILES for path in model.glob(pattern)):
        if path.is_file():
            shutil.copyfile(path, partial / path.name)
    partial.rename(folder)


def no_folder(key: str, path: str) -> DataError:
    """Return the error of a model's path that is no folder."""
    if Path(path).is_file() and path.lower().endswith(".gguf"):
        return DataError(
            f"{key} = {path} is a GGUF file: make a folder of it with "
            f"megadapo convert gguf-to-hf {path} DST, and name that"
        )
    return DataError(f"{key} = {path!r}: there is no such folder, here or beside the recipe")


def resolve_model_folder(path: str, *, with_weights: bool, key: str = "model.path") -> Path:
    """Return the model's folder on this machine; download a Hub name into the Hub's cache.

    Raise DataError if the folder does not exist and the Hub cannot provide it.
    """
    if Path(path).is_dir():
        return Path(path)
    if not is_hub_name(path):
        raise no_folder(key, path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*SMALL_FILES, *["*.safetensors"] * with_weights]
    try:
        return Path(snapshot_download(path, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise DataError(
            f"{key} = {path!r} is neither a folder nor could it be read from the Hub: {error}"
        ) from error
