"""A model in megatron-core's checkpoint format: written, and read, one weight at a time.

It needs no ranks, model or GPU. A checkpoint of any split names every parameter once for the whole
model: stacked over layers and experts, cut into chunks, the vocabulary padded. So it has the layout
of one unsplit rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from megadapo.errors import WeightError
from megadapo.weights.disk.export import progress_bar
from megadapo.weights.disk.files import hashed_file
from megadapo.weights.disk.sources import TensorSource, collect_spans, fill_shard
from megadapo.weights.disk.torch_checkpoint import (
    Box,
    StoredTensors,
    shard_name,
    store_piece,
    write_metadata,
)
from megadapo.weights.layout.layout import ModelLayout
from megadapo.weights.layout.shards import Shard, ShardPosition

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.+\.experts)\.local_experts\.(\d+)\.(.+)")
_NOT_WEIGHTS = ("optimizer.", "chained_")
"""Prefixes of masters and moments."""


@dataclass(frozen=True)
class _Place:
    """Place of a parameter in a checkpoint."""

    stored: str
    numbers: tuple[int, ...]
    """Layer and expert, as far as they are axes of the stored tensor."""
    lengths: tuple[int, ...]
    """Lengths of these axes."""


def write_weights(
    source: TensorSource, layout: ModelLayout, folder: Path, dtype: torch.dtype
) -> None:
    """Write a model into an existing folder, in the format of megatron-core.

    It loads the checkpoint at any split.
    """
    shards = list(layout.megatron_shards(_unsplit(layout)))
    names, file_name, pieces = {shard.name for shard in shards}, shard_name(0), []
    with (
        hashed_file(folder / file_name) as file,
        progress_bar("hf-to-megatron", len(shards)) as advance,
    ):
        for shard in shards:
            param = torch.empty(shard.shape, dtype=dtype)
            fill_shard(param, shard, source)
            # a norm before a linear layer has the name of the two fused, also if they are not
            fused = shard.alias or ""
            is_fused = fused.replace("layer_norm_weight", "weight") in names
            place = next(_places(fused if is_fused else shard.name, layout))
            piece = store_piece(
                file,
                file_name,
                param.view(*[1] * len(place.numbers), *shard.shape),
                key=place.stored,
                shape=(*place.lengths, *shard.shape),
                offset=(*place.numbers, *[0] * len(shard.shape)),
            )
            pieces.append(piece)
            advance()
    write_metadata(folder, pieces)


class TrainerCheckpoint:
    """The weights of a checkpoint under their Hugging Face names.

    Raise CheckpointError if the metadata is damaged or not a checkpoint's, and WeightError that
    names the differences if it is not of the layout's model.

    Args:
        folder: Folder of the trainer's shards, already checked against their SHA-256.
        layout: Layout of the trained model.
    """

    def __init__(self, folder: Path, layout: ModelLayout) -> None:
        self.folder = folder
        self.layout = layout
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
            local = self._read(place)
            full = {
                span.tensor: torch.empty(self.layout.hf_shapes[span.tensor], dtype=self.dtype)
                for span in shard.spans
            }
            collect_spans(full, shard, local)
            yield from full.items()

    def _match(self) -> list[tuple[Shard, _Place]]:
        """Pair every parameter of the model with its stored tensor."""
        pairs, problems, unknown = [], [], set(self._stored)
        for shard in self.layout.megatron_shards(self._position()):
            place = self._place(shard)
            if place is None:
                problems.append(f"{shard.name} is missing")
                continue
            unknown.discard(place.stored)
            expected = (*place.lengths, *shard.shape)
            found = self._stored[place.stored].size
            if expected != tuple(found):
                problems.append(
                    f"{place.stored} is {list(found)}, config.json says {list(expected)}"
                )
            pairs.append((shard, place))
        problems += [f"{name} is not in the layout" for name in sorted(unknown)]
        if problems:
            listed = "; ".join(dict.fromkeys(problems[:10]))
            raise WeightError(
                f"{self.folder} is a checkpoint of another model than config.json: {listed}."
            )
        return pairs

    def _position(self) -> ShardPosition:
        """Return the position of an unsplit rank, with the stored padding of the vocabulary."""
        embedding = self._stored.get(self.layout.family.embedding.megatron)
        rows = 0 if embedding is None else embedding.size[0]
        return replace(
            _unsplit(self.layout), padded_vocab_size=max(rows, self.layout.shape.vocab_size)
        )

    def _place(self, shard: Shard) -> _Place | None:
        for name in filter(None, (shard.name, shard.alias)):
            for place in _places(name, self.layout):
                if place.stored in self._stored:
                    return place
        return None

    def _read(self, place: _Place) -> Tensor:
        """Read one parameter from its chunks."""
        stored = self._stored[place.stored]
        sizes = tuple(stored.size)[len(place.numbers) :]
        start = (*place.numbers, *[0] * len(sizes))
        target = torch.empty((*[1] * len(place.numbers), *sizes), dtype=stored.properties.dtype)
        self._all.read([Box(place.stored, start, target)])
        return target.reshape(sizes)


def _unsplit(layout: ModelLayout) -> ShardPosition:
    return ShardPosition(layer_indices=tuple(range(layout.shape.num_layers)))


def _places(name: str, layout: ModelLayout) -> Iterator[_Place]:
    """Yield where an unsplit model's parameter can be: layers are stacked, or have own tensors."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        yield _Place(name, (), ())
        return
    row, numbers, lengths = layer[2], list[int](), list[int]()
    if expert := _EXPERT.fullmatch(row):
        row, numbers = f"{expert[1]}.experts.{expert[3]}", [int(expert[2])]
        lengths = [layout.shape.num_experts]
    stacked = (int(layer[1]), *numbers), (layout.shape.num_layers, *lengths)
    yield _Place(f"decoder.layers.{row}", *stacked)
    yield _Place(f"decoder.layers.{layer[1]}.{row}", tuple(numbers), tuple(lengths))
