"""Full tensors of a trainer's checkpoint, one weight at a time; needs no ranks, model or GPU.

A checkpoint of any split names every parameter once for the whole model: stacked over layers and
experts, cut into chunks, the vocabulary padded. So it has the layout of one unsplit rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from megadapo.errors import WeightError
from megadapo.weights.disk.load import collect_runs
from megadapo.weights.disk.torch_checkpoint import StoredTensors, Window
from megadapo.weights.layout.layout import ModelLayout
from megadapo.weights.layout.shards import Shard, ShardPosition

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.+\.experts)\.local_experts\.(\d+)\.(.+)")
_NOT_WEIGHTS = ("optimizer.", "chained_")
"""Prefixes of masters and moments."""

Place = tuple[str, tuple[int, ...]]
"""A stored tensor, and the layer and expert numbers that index its stacked axes."""


class TrainerCheckpoint:
    """The weights of a checkpoint under their Hugging Face names.

    Args:
        folder: Folder of the trainer's shards, already checked against their SHA-256.
        layout: Layout of the trained model.

    Raises:
        CheckpointError: The metadata is damaged or not a checkpoint's.
        WeightError: The checkpoint is not of the layout's model; the error names the differences.
    """

    def __init__(self, folder: Path, layout: ModelLayout) -> None:
        self.folder = folder
        self._layout = layout
        self._all = StoredTensors(folder)
        self._stored = {
            name: stored
            for name, stored in self._all.tensors.items()
            if not name.startswith(_NOT_WEIGHTS)
        }
        self._places = self._match()

    @cached_property
    def dtype(self) -> torch.dtype:
        """Return the type that all weights share."""
        dtypes = {stored.properties.dtype for stored in self._stored.values()}
        if len(dtypes) != 1:
            found = ", ".join(sorted(map(str, dtypes)))
            raise WeightError(f"{self.folder}: weights have different types: {found}.")
        return dtypes.pop()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every full tensor in the order of the model; holds one weight at a time."""
        for shard, place in self._places:
            local = self._read(*place)
            full = {
                run.tensor: torch.empty(self._layout.hf_shapes[run.tensor], dtype=self.dtype)
                for run in shard.runs
            }
            collect_runs(full, shard, local)
            yield from full.items()

    def _match(self) -> list[tuple[Shard, Place]]:
        """Pair every parameter of the model with its stored tensor."""
        lengths = (self._layout.shape.num_layers, self._layout.shape.num_experts)
        shards = list(self._layout.megatron_shards(self._position()))
        pairs, problems, unknown = [], [], set(self._stored)
        for shard in shards:
            place = self._place(shard)
            if place is None:
                problems.append(f"{shard.name} is missing")
                continue
            unknown.discard(place[0])
            expected = (*lengths[: len(place[1])], *shard.shape)
            found = self._stored[place[0]].size
            if expected != tuple(found):
                problems.append(f"{place[0]} is {list(found)}, config.json says {list(expected)}")
            pairs.append((shard, place))
        problems += [f"{name} is not in the layout" for name in sorted(unknown)]
        if problems:
            listed = "; ".join(dict.fromkeys(problems[:10]))
            raise WeightError(
                f"{self.folder} is a checkpoint of another model than model.path: {listed}."
            )
        return pairs

    def _position(self) -> ShardPosition:
        """Return the position of an unsplit rank, with the stored padding of the vocabulary."""
        embedding = self._stored.get(self._layout.family.embedding.megatron)
        rows = 0 if embedding is None else embedding.size[0]
        return ShardPosition(
            layer_indices=tuple(range(self._layout.shape.num_layers)),
            padded_vocab_size=max(rows, self._layout.shape.vocab_size),
        )

    def _place(self, shard: Shard) -> Place | None:
        for name in filter(None, (shard.name, shard.alias)):
            stacked, numbers = _stacked(name)
            if stacked in self._stored:
                return stacked, numbers
        return None

    def _read(self, name: str, numbers: tuple[int, ...]) -> Tensor:
        """Read one parameter from its chunks."""
        stored = self._stored[name]
        start, sizes = [0] * len(stored.size), list(stored.size)
        for axis, number in enumerate(numbers):
            start[axis], sizes[axis] = number, 1
        target = torch.empty(sizes, dtype=stored.properties.dtype)
        self._all.read([Window(name, tuple(start), target)])
        return target.reshape(sizes[len(numbers) :])


def _stacked(name: str) -> Place:
    """Return the stored tensor of an unsplit model's parameter."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return name, ()
    expert = _EXPERT.fullmatch(layer[2])
    if expert is None:
        return f"decoder.layers.{layer[2]}", (int(layer[1]),)
    return f"decoder.layers.{expert[1]}.experts.{expert[3]}", (int(layer[1]), int(expert[2]))
