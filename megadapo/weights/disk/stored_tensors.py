"""Parts of the tensors that a distributed checkpoint holds, whatever boxes they were written in."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megadapo.errors import CheckpointError
from megadapo.weights.disk.torch_checkpoint import read_metadata

_UNREADABLE = (OSError, EOFError, RuntimeError, pickle.UnpicklingError)
"""What a missing, short or changed file raises where torch reads it."""

_Targets = dict[tuple[str, torch.Size | None], Tensor]
"""By tensor and offset."""


@dataclass(frozen=True)
class Window:
    """A box of a stored tensor that is wanted in memory."""

    key: str
    offset: tuple[int, ...]
    target: Tensor
    """Has the sizes of the box; what the stored tensor does not reach stays as it is."""


class StoredTensors:
    """The tensors of one folder, by name.

    Raises:
        CheckpointError: the metadata is missing, damaged or not a checkpoint's.
    """

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

    def read(self, windows: Iterable[Window]) -> None:
        """Fill all targets; every file is opened once.

        Raises:
            CheckpointError: a file cannot be read, or does not hold what the metadata says.
        """
        wanted: dict[str, list[Window]] = defaultdict(list)
        for window in windows:
            wanted[window.key].append(window)
        items = [item for key, of_key in wanted.items() for item in self._items(key, of_key)]
        targets: _Targets = {
            (w.key, torch.Size(w.offset)): w.target for of in wanted.values() for w in of
        }
        try:
            self._reader.read_data(LoadPlan(items), _ReadInto(targets))
        except _UNREADABLE as error:
            raise CheckpointError(f"{self.folder} cannot be read: {error}") from error

    def _items(self, key: str, windows: list[Window]) -> list[ReadItem]:
        stored = self.tensors[key]
        boxes = [
            ChunkStorageMetadata(torch.Size(window.offset), window.target.size())
            for window in windows
        ]
        items = create_read_items_for_chunk_list(key, stored, boxes)
        within = sum(_num_within(box, stored.size) for box in boxes)
        if sum(prod(item.lengths) for item in items) != within:
            raise CheckpointError(f"{self.folder}: the chunks of {key} do not add up to it")
        return items


def _num_within(box: ChunkStorageMetadata, shape: torch.Size) -> int:
    ends = (min(a + b, c) for a, b, c in zip(box.offsets, box.sizes, shape, strict=True))
    return prod(max(0, end - start) for end, start in zip(ends, box.offsets, strict=True))


class _ReadInto(DefaultLoadPlanner):
    """Tells torch's reader where to put what it reads."""

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
        """Nothing is left to do: the reader has copied into the target itself."""
