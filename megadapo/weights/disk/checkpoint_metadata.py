"""The `.metadata` of a distributed checkpoint, read without trusting it.

The file is a pickle, which could name any function to be called. Here it can name the plain
classes that such metadata consists of, and nothing else: anything more is refused, not run.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megadapo.errors import CheckpointError

METADATA_FILE = ".metadata"

_ADMITTED = {
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
}
"""By module, what torch and megatron-core write; torch's types (`float32`) are admitted besides."""

_DAMAGED = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    ImportError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
)
"""What reading a pickle raises, by the place where it is damaged."""


def read_metadata(folder: Path) -> Metadata:
    """The metadata of the checkpoint in `folder`.

    Raises:
        CheckpointError: it is not there, damaged, or names something that no checkpoint consists
            of, which is not run; or it points at files outside of the folder.
    """
    path = folder / METADATA_FILE
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except _DAMAGED as error:
        raise CheckpointError(f"{path} is not the metadata of a checkpoint: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise CheckpointError(f"{path} is not the metadata of a checkpoint")
    _check_files(path, metadata)
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ADMITTED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which was not run")


def _check_files(path: Path, metadata: Metadata) -> None:
    """Every chunk must lie in a file beside the metadata."""
    places = metadata.storage_data
    if not isinstance(places, dict):
        raise CheckpointError(f"{path} does not say where its tensors lie")
    for index, place in places.items():
        is_known = isinstance(index, MetadataIndex) and isinstance(place, _StorageInfo)
        if not is_known or Path(place.relative_path).name != place.relative_path:
            raise CheckpointError(f"{path} points at {place!r}, which is not a file beside it")
