"""The `.metadata` of a distributed checkpoint: written from what ranks report, read without trust.

The file is a pickle, which could name any function to be called. Here it can name the plain
classes that such metadata consists of, and nothing else: anything more is refused, not run.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megadapo.errors import CheckpointError
from megadapo.weights.disk.files import FileEntry, hashed_file

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


@dataclass(frozen=True)
class StoredPiece:
    """A box of a tensor, and where a rank has put it."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    """First byte in the file."""
    num_bytes: int


def write_metadata(folder: Path, pieces: Iterable[StoredPiece]) -> FileEntry:
    """Say where everything lies that the ranks have written into `folder`.

    Raises:
        CheckpointError: a tensor has gaps, or two ranks have written the same part of it.
        OSError: it could not be written.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for piece in pieces:
        tensor = tensors.setdefault(
            piece.key,
            TensorStorageMetadata(TensorProperties(piece.dtype), torch.Size(piece.shape), []),
        )
        tensor.chunks.append(
            ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.sizes))
        )
        index = MetadataIndex(piece.key, piece.offset)
        places[index] = _StorageInfo(piece.file, piece.start, piece.num_bytes)
    for key, tensor in tensors.items():
        expected = prod(tensor.size)
        written = sum(prod(chunk.sizes) for chunk in tensor.chunks)
        if written != expected:
            raise CheckpointError(f"{folder}: {written} of {expected} values of {key} were written")
    metadata = Metadata(state_dict_metadata=dict(tensors), storage_data=places, version="1.0.0")
    with hashed_file(folder / METADATA_FILE) as file:
        file.write(pickle.dumps(metadata))
    return file.entry


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
