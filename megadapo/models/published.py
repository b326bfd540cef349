"""Configurations of published models, so that a run can be planned where no model is at hand.

Each is what decides a model's sizes in the config.json of the Hub, under the model's own name.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from megadapo.errors import DataError
from megadapo.models.folder import cached_hub_folder, is_hub_name, read_hf_config


def find_hf_config(path: str, *, key: str = "model.path") -> dict[str, Any]:
    """The configuration of a model that need not be here, nothing downloaded.

    Args:
        path: a folder, a name on the Hub, or where the model lies on another machine.
        key: what the path is called in the configuration.

    Raises:
        DataError: it is neither here nor among the models whose configuration comes along.
    """
    folder = Path(path) if Path(path).is_dir() else None
    if folder is None and is_hub_name(path):
        folder = cached_hub_folder(path)
    name = Path(path).name
    if folder is None and name in published_models():
        folder = Path(str(files(__package__) / "configs" / name))
        return read_hf_config(folder)
    if folder is None:
        raise DataError(
            f"{key} = {path!r}: there is no such folder here, and of models that are not here only "
            f"these are known: {', '.join(published_models())}; copy the model's config.json into "
            f"a folder and name that"
        )
    return read_hf_config(folder)


def published_models() -> tuple[str, ...]:
    """Names, without the organisation, of the models whose configuration comes along."""
    folder = files(__package__) / "configs"
    return tuple(sorted(entry.name for entry in folder.iterdir()))
