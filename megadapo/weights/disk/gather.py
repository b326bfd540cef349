"""Gather full tensors from the shards of a trainer's ranks, one weight at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megadapo.errors import WeightError
from megadapo.models.rows import Weight
from megadapo.weights.disk.load import collect_runs, match_params, single_dtype
from megadapo.weights.layout.layout import ModelLayout, hf_names
from megadapo.weights.layout.shards import Shard, ShardPosition


@dataclass(frozen=True)
class ProcessGroups:
    """The process groups of one replica of the model; None for an axis of size 1."""

    tp: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None
    ep: dist.ProcessGroup | None = None
    etp: dist.ProcessGroup | None = None
    """Tensor parallelism inside experts; None: the same as `tp`."""


@torch.no_grad()
def gather_weights(
    params: Mapping[str, torch.Tensor],
    layout: ModelLayout,
    position: ShardPosition,
    groups: ProcessGroups,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every full tensor by its Hugging Face name, on every rank, in the same order.

    Collective over `groups`: all ranks must iterate to the end. Memory: the tensors of one weight,
    or of one expert per expert-parallel rank.
    """
    yield from _Gatherer(params, layout, position, groups)


class _Gatherer:
    """One pass over a model; every rank visits the same weights in the same order."""

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        layout: ModelLayout,
        position: ShardPosition,
        groups: ProcessGroups,
    ) -> None:
        pairs = match_params(params, layout, position)
        self._local = {shard.name: param.detach() for shard, param in pairs}
        self._dtype = single_dtype(self._local.values())
        self._device = next(iter(self._local.values())).device
        self._layout, self._position, self._groups = layout, position, groups
        own = (position.layer_indices, position.has_embedding, position.has_head)
        self._stages: list[Any] = [own] * position.pp_size
        if groups.pp is not None:
            dist.all_gather_object(self._stages, own, group=groups.pp)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        family = self._layout.family
        yield from self._weight(family.embedding, None, self._stage("embedding"))
        for layer in range(self._layout.shape.num_layers):
            owner = self._stage(layer)
            for row in self._layout.layer_rows:
                yield from self._weight(row, str(layer), owner)
        yield from self._weight(family.final_norm, None, self._stage("head"))
        if not self._layout.shape.tied:
            yield from self._weight(family.head, None, self._stage("head"))

    def _stage(self, what: int | str) -> int:
        """Return the pipeline stage of a layer, the embedding or the head."""
        for stage, (layers, has_embedding, has_head) in enumerate(self._stages):
            if (
                (what == "embedding" and has_embedding)
                or (what == "head" and has_head)
                or what in layers
            ):
                return stage
        raise WeightError(f"No pipeline stage holds layer {what}.")

    def _weight(
        self, row: Weight, layer: str | None, owner: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        if not row.expert:
            yield from self._broadcast(self._assemble(row, layer, None, owner), owner)
            return
        per_rank = self._layout.shape.num_experts // self._position.ep_size
        for local in range(per_rank):
            mine = self._assemble(row, layer, local, owner)
            full = self._exchange_experts(mine, row, layer, local) if self._mine(owner) else mine
            yield from self._broadcast(full, owner)

    def _mine(self, owner: int) -> bool:
        return owner == self._position.pp_rank

    def _assemble(
        self, row: Weight, layer: str | None, expert: int | None, owner: int
    ) -> dict[str, torch.Tensor]:
        """Assemble the full tensors of one weight from the tensor-parallel ranks' shards."""
        position = self._position
        if not self._mine(owner):
            ranks = range(position.ep_size) if row.expert else [0]
            return self._empty([n for rank in ranks for n in self._names(row, layer, expert, rank)])
        group = (self._groups.etp or self._groups.tp) if row.expert else self._groups.tp
        size = position.expert_tp[1] if row.expert else position.tp_size
        local = self._local[self._shard(row, layer, expert, position).name]
        parts = [local]
        if size > 1:
            parts = [torch.empty_like(local) for _ in range(size)]
            dist.all_gather(parts, local.contiguous(), group=group)
        shards = [
            self._shard(row, layer, expert, _at_tp_rank(position, rank, row))
            for rank in range(size)
        ]
        full = self._empty(self._names(row, layer, expert, position.ep_rank))
        for shard, part in zip(shards, parts, strict=True):
            collect_runs(full, shard, part)
        return full

    def _shard(
        self,
        row: Weight,
        layer: str | None,
        expert: int | None,
        position: ShardPosition,
    ) -> Shard:
        if expert is None:
            return self._layout.megatron_shard(row, position, layer)
        numbers = (expert, self._global_number(expert, position.ep_rank))
        return self._layout.megatron_shard(row, position, layer, numbers)

    def _global_number(self, expert: int, ep_rank: int) -> int:
        return ep_rank * (self._layout.shape.num_experts // self._position.ep_size) + expert

    def _names(self, row: Weight, layer: str | None, expert: int | None, ep_rank: int) -> list[str]:
        number = None if expert is None else self._global_number(expert, ep_rank)
        return hf_names(row, layer, number)

    def _empty(self, names: list[str]) -> dict[str, torch.Tensor]:
        shapes = self._layout.hf_shapes
        return {
            name: torch.empty(shapes[name], dtype=self._dtype, device=self._device)
            for name in names
        }

    def _exchange_experts(
        self, mine: dict[str, torch.Tensor], row: Weight, layer: str | None, local: int
    ) -> dict[str, torch.Tensor]:
        """Gather the same local expert of every expert-parallel rank, under global names."""
        position = self._position
        if position.ep_size == 1:
            return mine
        everyone = [
            self._empty(self._names(row, layer, local, rank)) for rank in range(position.ep_size)
        ]
        full: dict[str, torch.Tensor] = {}
        for key, tensor in enumerate(mine.values()):
            parts = [list(tensors.values())[key] for tensors in everyone]
            dist.all_gather(parts, tensor, group=self._groups.ep)
        for tensors in everyone:
            full |= tensors
        return full

    def _broadcast(
        self, full: dict[str, torch.Tensor], owner: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Broadcast the tensors of the owning stage to the other stages."""
        for name, tensor in full.items():
            if self._position.pp_size > 1:
                stages = self._groups.pp
                assert stages is not None, "several stages have a group"
                dist.broadcast(tensor, src=dist.get_global_rank(stages, owner), group=stages)
            yield name, tensor


def _at_tp_rank(position: ShardPosition, rank: int, row: Weight) -> ShardPosition:
    if not row.expert:
        return replace(position, tp_rank=rank)
    return replace(position, etp_rank=rank, etp_size=position.expert_tp[1])
