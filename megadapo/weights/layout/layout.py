"""Layout of one model: every weight as shards in Megatron, in vLLM and in Hugging Face files.

A `Shard` is one local parameter as spans of full Hugging Face tensors. Import copies spans in,
export copies spans out, and the plan of a weight update intersects those of trainer and engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megadapo.errors import WeightError
from megadapo.models.families import Family, family_of
from megadapo.models.rows import TensorSplit, Weight
from megadapo.models.shape import ModelShape, model_shape
from megadapo.weights.layout import cuts
from megadapo.weights.layout.cuts import Span
from megadapo.weights.layout.shards import EnginePosition, Shard, ShardPosition

VOCAB_MULTIPLE = 64
"""Multiple to which the trainer and vLLM pad the vocabulary: checkpoints fit every common split."""


@dataclass(frozen=True)
class ModelLayout:
    """All weights of one model, with their shards on any trainer or engine rank."""

    family: Family
    shape: ModelShape

    @cached_property
    def hf_axes(self) -> dict[str, tuple[str, ...]]:
        """Size symbols of the axes of every Hugging Face tensor, in the order of the model."""
        axes = self._row_axes(self.family.embedding, "")
        for layer in range(self.shape.num_layers):
            for row in self.family.layer:
                axes |= self._row_axes(row, f"model.layers.{layer}.")
        axes |= self._row_axes(self.family.final_norm, "")
        if not self.shape.tied:
            axes |= self._row_axes(self.family.head, "")
        return axes

    @cached_property
    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shape of every Hugging Face tensor, in the order of the model."""
        return {
            name: tuple(self.shape.size(symbol) for symbol in axes)
            for name, axes in self.hf_axes.items()
        }

    def megatron_shards(self, position: ShardPosition) -> Iterator[Shard]:
        """Yield every parameter of a trainer rank, in model order."""
        if position.has_embedding:
            yield self.megatron_shard(self.family.embedding, position)
        for layer in position.layer_indices:
            yield from self.megatron_layer(position, str(layer))
        if position.has_head:
            yield self.megatron_shard(self.family.final_norm, position)
            # a tied head is the embedding itself, unless it is on another pipeline stage
            if not (self.shape.tied and position.has_embedding):
                yield self.megatron_head(position)

    def megatron_layer(self, position: ShardPosition, layer: str) -> Iterator[Shard]:
        """Yield a decoder layer's parameters on a trainer rank; `layer` may be a placeholder."""
        for row in self.family.layer:
            if not row.expert:
                yield self.megatron_shard(row, position, layer)
                continue
            local = self._per_rank_experts(position.ep_size)
            for expert in range(local):
                yield self.megatron_shard(
                    row, position, layer, (expert, position.ep_rank * local + expert)
                )

    def megatron_head(self, position: ShardPosition) -> Shard:
        """Return the output layer; of a tied model, its copy of the embedding."""
        head = self.megatron_shard(self.family.head, position)
        if not self.shape.tied:
            return head
        embedding = self.megatron_shard(self.family.embedding, position)
        return Shard(head.name, embedding.spans, head.axis, head.length, head.width)

    def megatron_shard(
        self,
        row: Weight,
        position: ShardPosition,
        layer: str | None = None,
        expert: tuple[int, int] | None = None,
    ) -> Shard:
        """Return one trainer parameter; `expert` is its local and its global index."""
        local, number = expert if expert is not None else (None, None)
        rank, size = position.expert_tp if row.expert else (position.tp_rank, position.tp_size)
        prefix = "" if layer is None else f"decoder.layers.{layer}."
        alias = row.megatron_alias
        return self._shard(
            row,
            hf_names(row, layer, number),
            rank=rank,
            size=size,
            padded=position.padded_vocab_size or padded_vocab_size(self.shape.vocab_size, size),
            cut_qkv=cuts.interleave_groups,
            name=prefix + _numbered(row.megatron, local),
            alias=None if alias is None else prefix + _numbered(alias, local),
        )

    def engine_layers(self, position: EnginePosition) -> range:
        """Return the decoder layers of an engine's pipeline stage, by vLLM's rule.

        The remainder of an even split goes to the stages before the last one.
        """
        base, left = divmod(self.shape.num_layers, position.pp_size)
        counts = [base] * position.pp_size
        for stage in range(position.pp_size - 1 - left, position.pp_size - 1):
            counts[stage] += 1
        start = sum(counts[: position.pp_rank])
        return range(start, start + counts[position.pp_rank])

    def engine_shards(self, position: EnginePosition) -> Iterator[Shard]:
        """Yield every parameter of an engine rank, in model order."""
        is_first, is_last = position.pp_rank == 0, position.pp_rank == position.pp_size - 1
        if is_first or (is_last and self.shape.tied):
            yield self.engine_shard(self.family.embedding, position)
        for layer in self.engine_layers(position):
            yield from self.engine_layer(position, str(layer))
        if is_last:
            yield self.engine_shard(self.family.final_norm, position)
            if not self.shape.tied:
                yield self.engine_shard(self.family.head, position)

    def engine_layer(self, position: EnginePosition, layer: str) -> Iterator[Shard]:
        """Yield a decoder layer's parameters on an engine rank; `layer` may be a placeholder."""
        for row in self.family.layer:
            if not row.expert:
                yield self.engine_shard(row, position, layer)
                continue
            ranks = position.tp_size if position.expert_parallel else 1
            local = self._per_rank_experts(ranks)
            first = position.tp_rank * local if position.expert_parallel else 0
            for expert in range(local):
                yield self.engine_shard(
                    row, position, layer, (expert, first + expert), num_experts=local
                )

    def engine_shard(
        self,
        row: Weight,
        position: EnginePosition,
        layer: str | None = None,
        expert: tuple[int, int] | None = None,
        num_experts: int = 0,
    ) -> Shard:
        """Return one engine parameter, or one expert's slice of it."""
        local, number = expert if expert is not None else (None, None)
        whole_experts = row.expert and position.expert_parallel
        rank, size = (0, 1) if whole_experts else (position.tp_rank, position.tp_size)
        return self._shard(
            row,
            hf_names(row, layer, number),
            rank=rank,
            size=size,
            padded=cuts.round_up(self.shape.vocab_size, VOCAB_MULTIPLE),
            cut_qkv=cuts.stack_heads,
            name=row.vllm if layer is None else f"model.layers.{layer}.{row.vllm}",
            expert=local,
            num_experts=num_experts,
        )

    def _shard(
        self,
        row: Weight,
        tensors: list[str],
        *,
        rank: int,
        size: int,
        padded: int,
        cut_qkv: Callable[[list[str], list[int], int, int, int], list[Span]],
        **names: Any,
    ) -> Shard:
        """Return part `rank` of `size` of a row; Megatron and vLLM cut all but QKV equally."""
        is_column_cut = row.split is TensorSplit.COLUMNS
        symbols, across = row.row_sizes, row.column_size
        if is_column_cut:
            assert row.column_size is not None, "a vector has no columns to cut"
            symbols, across = (row.column_size,), row.row_sizes[0]
        sizes = [self.shape.size(symbol) for symbol in symbols]
        if row.split is TensorSplit.REPLICATED:
            spans = cuts.whole(tensors, sizes)
        elif row.split is TensorSplit.QKV:
            spans = cut_qkv(tensors, sizes, self.shape.num_kv_heads, rank, size)
        elif row.split is TensorSplit.VOCAB:
            spans = cuts.cut_padded(tensors[0], sizes[0], padded, rank, size)
        else:
            spans = cuts.cut_each(tensors, sizes, rank, size)
        return Shard(
            spans=tuple(spans),
            axis=1 if is_column_cut else 0,
            length=padded // size
            if row.split is TensorSplit.VOCAB
            else sum(span.size for span in spans),
            width=None if across is None else self.shape.size(across),
            **names,
        )

    def _row_axes(self, row: Weight, prefix: str) -> dict[str, tuple[str, ...]]:
        tail = () if row.column_size is None else (row.column_size,)
        numbers = range(self.shape.num_experts) if row.expert else [None]
        return {
            prefix + _numbered(name, number): (symbol, *tail)
            for number in numbers
            for name, symbol in zip(row.hf, row.row_sizes, strict=True)
        }

    def _per_rank_experts(self, ranks: int) -> int:
        if self.shape.num_experts % ranks:
            raise WeightError(
                f"{self.shape.num_experts} experts cannot be spread evenly over {ranks} ranks."
            )
        return self.shape.num_experts // ranks


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Return the padded vocabulary's rows over all tensor-parallel ranks of the trainer."""
    return cuts.round_up(vocab_size, math.lcm(VOCAB_MULTIPLE, tp_size))


def layout_for(hf_config: Mapping[str, Any]) -> ModelLayout:
    """Return the layout of the model that a Hugging Face configuration describes."""
    return ModelLayout(family_of(hf_config), model_shape(hf_config))


def _numbered(name: str, expert: int | None) -> str:
    return name if expert is None else name.replace("{e}", str(expert))


def hf_names(row: Weight, layer: str | None, expert: int | None) -> list[str]:
    """Return the full Hugging Face names of a row's tensors; `expert` is the global index."""
    prefix = "" if layer is None else f"model.layers.{layer}."
    return [prefix + _numbered(name, expert) for name in row.hf]
