"""Positions of trainer and engine ranks, and their parameters as spans of full tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megadapo.weights.layout.cuts import Span


@dataclass(frozen=True, kw_only=True)
class ShardPosition:
    """Position of a trainer rank, which decides its part of the model."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    layer_indices: tuple[int, ...]
    """Global indices of this rank's decoder layers, over all its virtual stages."""
    has_embedding: bool = True
    has_head: bool = True
    """Whether the rank has the final norm and the head (of a tied model: its embedding copy)."""
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int | None = None
    etp_size: int | None = None
    """Tensor-parallel size inside experts; None: `tp_size`."""
    padded_vocab_size: int | None = None
    """Rows of the vocabulary with padding; None: `layout.padded_vocab_size`."""

    @property
    def expert_tp(self) -> tuple[int, int]:
        """Rank and size of tensor parallelism inside experts."""
        if self.etp_size is None or self.etp_rank is None:
            return self.tp_rank, self.tp_size
        return self.etp_rank, self.etp_size


@dataclass(frozen=True, kw_only=True)
class EnginePosition:
    """Position of an engine rank, which decides its part of the model."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    expert_parallel: bool = False
    """Whether the tensor-parallel ranks have whole experts (vLLM's `enable_expert_parallel`)."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One local parameter: spans of full tensors end to end along `axis`, zeros after them."""

    name: str
    spans: tuple[Span, ...]
    axis: int
    length: int
    """Extent along `axis`, padding included."""
    width: int | None
    """Extent along the other axis; None for a vector."""
    alias: str | None = None
    """Second name that the parameter may have."""
    expert: int | None = None
    """Index along the leading expert axis of a parameter that stacks several experts."""
    num_experts: int = 0
    """Length of the expert axis; 0: no such axis."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local parameter, without a leading expert axis."""
        if self.width is None:
            return (self.length,)
        return (self.length, self.width) if self.axis == 0 else (self.width, self.length)

    @property
    def numel_per_row(self) -> int:
        """Elements per position along `axis`."""
        return 1 if self.width is None else self.width

    def placed_spans(self) -> Iterator[tuple[int, Span]]:
        """Yield each span with its offset along `axis` in the local parameter."""
        offset = 0
        for span in self.spans:
            yield offset, span
            offset += span.size
