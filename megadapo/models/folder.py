"""Where a model lies: a folder, or a name on the Hugging Face Hub, and the config.json in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from megadapo.errors import DataError

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""ORGANISATION/NAME."""


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model's folder.

    Raises:
        DataError: there is none, or it is not one.
    """
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"model.path: {path} cannot be read as a model config: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"model.path: {path} is not a model's configuration")
    return content


def cached_hub_folder(name: str) -> Path | None:
    """Where a Hub model's config.json lies in the Hub's cache; None where it does not."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def path_from_anywhere(path: str) -> str:
    """A model's path for processes that start in other folders; a Hub name stays what it is."""
    return str(Path(path).absolute()) if Path(path).is_dir() else path


def is_hub_name(text: str) -> bool:
    """Whether a path that does not exist here can be meant as ORGANISATION/NAME on the Hub."""
    return HUB_NAME.fullmatch(text) is not None and not Path(text).parent.is_dir()


def resolve_model_folder(path: str, *, with_weights: bool, key: str = "model.path") -> Path:
    """The model's folder on this machine; a Hub name is downloaded into the Hub's cache.

    Args:
        key: what the path is called in the configuration.

    Raises:
        DataError: there is no such folder, and the Hub does not give it.
    """
    if Path(path).is_dir():
        return Path(path)
    if not is_hub_name(path):
        raise DataError(f"{key} = {path!r}: there is no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.txt"] + (["*.safetensors"] if with_weights else [])
    try:
        return Path(snapshot_download(path, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise DataError(
            f"{key} = {path!r} is neither a folder nor could it be read from the Hub: {error}"
        ) from error
