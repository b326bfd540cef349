"""The weights, masters and moments that a rank owns, and their place in the whole model.

The distributed optimizer divides each parameter into runs of elements, one per rank with the same
weights. A run is a few boxes of the whole tensor. So every rank writes just its own boxes, nothing
is gathered for a checkpoint, and any other split finds the boxes that it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megadapo.trainer.model.megatron_internals import optimizer_state_of

MASTER = "fp32_param"
"""Name of the fp32 master in a parameter's state."""
_STATE_KEY = "optimizer.state.{name}.{key}"


@dataclass(frozen=True)
class Piece:
    """A box of one tensor of the whole model, and this rank's memory of it."""

    key: str
    """Name of the tensor in checkpoints."""
    shape: tuple[int, ...]
    """Shape of the whole tensor; layers and experts are its leading axes."""
    offset: tuple[int, ...]
    """Start of the box in the whole tensor."""
    data: Tensor
    """View of the box: a write changes the model."""
    is_flexible: bool
    """Whether the number of rows may differ at another split: a padded vocabulary."""


@dataclass(frozen=True)
class OwnedRun:
    """One parameter's run of elements."""

    weight: Tensor
    """Part of the model's parameter, flat."""
    master: Tensor
    """Part of the optimizer's master, flat; fp32 weights are their own masters."""
    weights: tuple[Piece, ...]
    state: tuple[Piece, ...]
    """Boxes of the master and the moments."""
    is_first_replica: bool
    """Whether no lower tensor-parallel rank or pipeline stage owns the same elements."""


def owned_runs(
    chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer
) -> list[OwnedRun]:
    """Return every run that this rank's optimizer updates."""
    places = _places_of(chunks)
    return [
        _owned_run(parameter, start, stop, state, places[parameter])
        for parameter, start, stop, state in optimizer_state_of(optimizer)
    ]


def runs_of_copies(
    chunks: Sequence[DistributedDataParallel], copies: Mapping[Tensor, Tensor]
) -> list[OwnedRun]:
    """Return a run for the copy of each whole parameter; its state is the copy.

    Args:
        copies: by parameter.
    """
    places, runs = _places_of(chunks), []
    for parameter, copy in copies.items():
        flat, ((_, first), *_) = copy.view(-1), places[parameter]
        runs.append(
            OwnedRun(
                weight=flat,
                master=flat,
                weights=(),
                state=tuple(_pieces("{key}", flat, 0, places[parameter])),
                is_first_replica=first.replica_id == (0, 0, 0),
            )
        )
    return runs


_ParameterPart = tuple[int, ShardedTensor]
"""First element of a contiguous part in the flat parameter, and its place in the whole model."""


def _places_of(chunks: Sequence[DistributedDataParallel]) -> dict[Tensor, list[_ParameterPart]]:
    return {
        entry.data: _places(entry)
        for chunk in chunks
        for entry in nested_values(chunk.module.sharded_state_dict(metadata={}))
        if isinstance(entry, ShardedTensor | ShardedTensorFactory)
    }


def _places(entry: ShardedTensor | ShardedTensorFactory) -> list[_ParameterPart]:
    """Return the place of each part: gate and up projection, one parameter, are two tensors."""
    parts: Any = [entry] if isinstance(entry, ShardedTensor) else list(nested_values(entry.build()))
    whole = entry.data
    assert all(part.data.is_contiguous() for part in parts), "parts are runs of a parameter's rows"
    return [(part.data.storage_offset() - whole.storage_offset(), part) for part in parts]


def _owned_run(
    parameter: Tensor, start: int, stop: int, state: dict[str, Tensor], places: list[_ParameterPart]
) -> OwnedRun:
    weight = parameter.detach().view(-1)[start:stop]
    replica = places[0][1].replica_id
    assert isinstance(replica, tuple) and len(replica) == 3, "(pipeline, tensor, data)"
    return OwnedRun(
        weight=weight,
        master=state[MASTER],
        weights=tuple(_pieces("{key}", weight, start, places)),
        state=tuple(
            piece
            for name, values in state.items()
            for piece in _pieces(_STATE_KEY.replace("{name}", name), values, start, places)
        ),
        # the last coordinate counts ranks that own different runs
        is_first_replica=replica[:2] == (0, 0),
    )


def _pieces(
    key: str, values: Tensor, first: int, places: Sequence[_ParameterPart]
) -> Iterator[Piece]:
    """Yield the boxes of a flat run that starts at the parameter's element `first`."""
    for part_start, tensor in places:
        start = max(first, part_start)
        stop = min(first + len(values), part_start + prod(tensor.local_shape))
        leading = (1,) * tensor.prepend_axis_num
        for offset, sizes in boxes(
            (*leading, *tensor.local_shape), start - part_start, stop - part_start
        ):
            num_values = prod(sizes)
            yield Piece(
                key=key.format(key=tensor.key),
                shape=tuple(tensor.global_shape),
                offset=tuple(a + b for a, b in zip(tensor.global_offset, offset, strict=True)),
                data=values[start - first : start - first + num_values].view(sizes),
                is_flexible=bool(tensor.allow_shape_mismatch),
            )
            start += num_values


def boxes(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offset and sizes of boxes that cover elements `start` to `stop` of a row-major tensor.

    Boxes are in the order of the elements: at most 2 n - 1 for n axes, 0 for an empty run.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (start,) * len(shape), (stop - start,) * len(shape)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if start < first * row:
        end = min(stop, first * row)
        yield from _in_row(shape, first - 1, start, end)
        start = end
    if start < last * row:
        zeros = (0,) * (len(shape) - 1)
        yield (first, *zeros), (last - first, *shape[1:])
        start = last * row
    if start < stop:
        yield from _in_row(shape, last, start, stop)


def _in_row(
    shape: Sequence[int], row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    before = row * prod(shape[1:])
    for offset, sizes in boxes(shape[1:], start - before, stop - before):
        yield (row, *offset), (1, *sizes)


@torch.no_grad()
def put_masters_into_weights(
    runs: Sequence[OwnedRun], chunks: Sequence[DistributedDataParallel]
) -> None:
    """Set the weights of all ranks from the masters, as an update does; collective."""
    for run in runs:
        run.weight.copy_(run.master)
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)
