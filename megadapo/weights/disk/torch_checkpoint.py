"""megatron-core's checkpoint format torch_dist: write it, read its metadata safely, read tensors.

The metadata is a pickle, and a pickle can call any function when it is read. This reader admits
only the plain classes that such metadata consists of and refuses everything else.
"""

from __future__ import annotations

import io
import json
import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megadapo.errors import CheckpointError
from megadapo.weights.disk.files import Files, HashedFile, hashed_file, unreadable
from megadapo.weights.disk.headers import METADATA_FILE

FORMAT_FILE = "metadata.json"
"""File by which megatron-core recognises its checkpoints."""
COMMON_FILE = "common.pt"
"""File of all that is no tensor. megatron-core requires it; here it is an empty table."""
EXTRA_FILE = "extra_state.distcp"
"""File of the state that layers have beside weights, which megatron-core requires; here it is None,
and every layer has the same one."""
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}

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
"""Module -> names that torch and megatron-core write; torch dtypes are admitted as well."""

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
"""Errors that reading a damaged pickle raises, depending on where it is damaged."""

_MISMATCHED = (FileNotFoundError, EOFError, RuntimeError, pickle.UnpicklingError)
"""Errors that torch's reader raises for a missing, short or changed file."""

_Targets = dict[tuple[str, torch.Size | None], Tensor]
"""(tensor, offset) -> the memory to read into."""


@dataclass(frozen=True)
class StoredPiece:
    """A box of a tensor and its position in a rank's file."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    """First byte in the file."""
    num_bytes: int


@dataclass(frozen=True)
class Box:
    """A box of a stored tensor to read into memory."""

    key: str
    offset: tuple[int, ...]
    target: Tensor
    """Tensor of the box's sizes; elements beyond the stored tensor stay unchanged."""


class StoredTensors:
    """The tensors of one checkpoint folder, by name; the metadata is read at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        metadata = read_metadata(folder)
        self.tensors = {
            key: stored
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)

    def read(self, boxes: Iterable[Box]) -> None:
        """Fill all targets; opens every file once.

        Raise CheckpointError if a file differs from the metadata, InfraError if it cannot be read.
        """
        wanted: dict[str, list[Box]] = defaultdict(list)
        for box in boxes:
            wanted[box.key].append(box)
        items = [item for key, of_key in wanted.items() for item in self._items(key, of_key)]
        targets: _Targets = {
            (w.key, torch.Size(w.offset)): w.target for of in wanted.values() for w in of
        }
        try:
            self._reader.read_data(LoadPlan(items), _ReadInto(targets))
        except _MISMATCHED as error:
            raise CheckpointError(f"{self.folder} cannot be read: {error}") from error
        except OSError as error:
            raise unreadable(self.folder, error) from error

    def _items(self, key: str, boxes: list[Box]) -> list[ReadItem]:
        stored = self.tensors[key]
        chunks = [ChunkStorageMetadata(torch.Size(box.offset), box.target.size()) for box in boxes]
        items = create_read_items_for_chunk_list(key, stored, chunks)
        within = sum(_num_within(chunk, stored.size) for chunk in chunks)
        if sum(prod(item.lengths) for item in items) != within:
            raise CheckpointError(f"{self.folder}: the stored chunks of {key} do not cover it")
        return items


def _num_within(chunk: ChunkStorageMetadata, shape: torch.Size) -> int:
    ends = (min(a + b, c) for a, b, c in zip(chunk.offsets, chunk.sizes, shape, strict=True))
    return prod(max(0, end - start) for end, start in zip(ends, chunk.offsets, strict=True))


def _overlap(boxes: list[ChunkStorageMetadata]) -> bool:
    """Return whether two boxes share an element."""
    boxes = sorted(boxes, key=lambda box: tuple(box.offsets))
    for number, box in enumerate(boxes):
        ends = [start + size for start, size in zip(box.offsets, box.sizes, strict=True)]
        for other in islice(boxes, number + 1, None):
            if ends and other.offsets[0] >= ends[0]:
                break  # the boxes after it begin there or later
            bounds = zip(box.offsets, ends, other.offsets, other.sizes, strict=True)
            if all(start < b + size and b < end for start, end, b, size in bounds):
                return True
    return False


class _ReadInto(DefaultLoadPlanner):
    """A planner that directs torch's reader to the targets."""

    def __init__(self, targets: _Targets) -> None:
        super().__init__()
        self._targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        offsets = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._targets[index.fqn, index.offset][
            tuple(slice(at, at + length) for at, length in offsets)
        ]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the reader has copied into the target itself."""


def store_piece(
    file: HashedFile,
    name: str,
    data: Tensor,
    *,
    key: str,
    shape: tuple[int, ...],
    offset: tuple[int, ...],
) -> StoredPiece:
    """Append the box `data` of a tensor to the shard file `name`."""
    start = file.tell()
    torch.save(data, cast(IO[bytes], file))
    return StoredPiece(
        key=key,
        dtype=data.dtype,
        shape=shape,
        offset=offset,
        sizes=tuple(data.shape),
        file=name,
        start=start,
        num_bytes=file.tell() - start,
    )


def shard_name(rank: int) -> str:
    """Return the name of a rank's shard file, as torch names it."""
    return f"__{rank}_0.distcp"


def write_metadata(folder: Path, pieces: Iterable[StoredPiece]) -> Files:
    """Write the positions of all pieces in `folder`, and the other files of megatron-core's format.

    Raise CheckpointError if a tensor has gaps, or two ranks have written the same part of it.
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
        written = sum(_num_within(chunk, tensor.size) for chunk in tensor.chunks)
        if written != expected:
            raise CheckpointError(f"{folder}: {written} of {expected} values of {key} were written")
        # values that are written twice can hide as many missing ones
        if _overlap(tensor.chunks):
            raise CheckpointError(f"{folder}: values of {key} were written twice")
    nothing = _saved([None])  # megatron-core saves lists of states
    states = dict.fromkeys(_extra_states(tensors), BytesStorageMetadata())
    places |= dict.fromkeys(map(MetadataIndex, states), _StorageInfo(EXTRA_FILE, 0, len(nothing)))
    metadata = Metadata({**tensors, **states}, storage_data=places, version="1.0.0")
    contents = {
        EXTRA_FILE: nothing,
        COMMON_FILE: _saved({}),
        FORMAT_FILE: json.dumps(_FORMAT).encode(),
        METADATA_FILE: pickle.dumps(metadata),
    }
    files: Files = {}
    for name, content in contents.items():
        with hashed_file(folder / name) as file:
            file.write(content)
        files[name] = file.entry
    return files


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _extra_states(tensors: Mapping[str, TensorStorageMetadata]) -> Iterator[str]:
    """Yield the names of the states of all layers that can have one in some layer spec."""
    for key, tensor in tensors.items():
        module, _, name = key.rpartition(".")
        if name != "weight" or key.startswith("optimizer."):
            continue
        num_stacked = key.startswith("decoder.layers.") + (".experts." in key)
        lengths = tuple(tensor.size)[:num_stacked] or (1,)
        whole = ".".join(map(str, lengths))
        modules = [module]
        if module.endswith("linear_proj"):
            modules.append(module.replace("linear_proj", "core_attention"))
        for place in product(*map(range, lengths)):
            shard = ".".join(map(str, place))
            yield from (f"{one}._extra_state/shard_{shard}_{whole}" for one in modules)


def read_metadata(folder: Path) -> Metadata:
    """Read the metadata of the checkpoint in `folder`.

    Raise CheckpointError if it is missing or damaged, names a class that is not admitted (and is
    not called), or points at files outside of the folder.
    """
    path = folder / METADATA_FILE
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except OSError as error:
        raise unreadable(path, error) from error
    except _DAMAGED as error:
        raise CheckpointError(f"{path} is not the metadata of a checkpoint: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise CheckpointError(f"{path} is not the metadata of a checkpoint")
    places = metadata.storage_data
    if not isinstance(places, dict):
        raise CheckpointError(f"{path} does not say in which files its tensors are")
    for index, place in places.items():
        is_known = isinstance(index, MetadataIndex) and isinstance(place, _StorageInfo)
        if not is_known or Path(place.relative_path).name != place.relative_path:
            raise CheckpointError(f"{path} points at {place!r}, which is not a file beside it")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ADMITTED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which was not run")
