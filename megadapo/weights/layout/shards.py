"""What one rank holds: its position in the model, and its parameters as runs of full tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megadapo.weights.layout.cuts import Run


@dataclass(frozen=True, kw_only=True)
class ShardPosition:
    """Where a trainer rank stands in the model: what of it the rank holds."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    layer_indices: tuple[int, ...]
    """Global numbers of the decoder layers this rank holds, over all its virtual stages."""
    has_embedding: bool = True
    has_head: bool = True
    """Holds the final norm and the head (of a tied model: its copy of the embedding)."""
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int | None = None
    etp_size: int | None = None
    """Tensor parallelism inside experts; None: as outside of them."""
    padded_vocab_size: int | None = None
    """Rows of the vocabulary with padding; None: as `padded_vocab_size` says."""

    @property
    def expert_tp(self) -> tuple[int, int]:
        """Rank and size of tensor parallelism inside experts."""
        if self.etp_size is None or self.etp_rank is None:
            return self.tp_rank, self.tp_size
        return self.etp_rank, self.etp_size


@dataclass(frozen=True, kw_only=True)
class EnginePosition:
    """Where an engine rank stands: its tensor-parallel rank, its stage, its experts."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    expert_parallel: bool = False
    """vLLM's `enable_expert_parallel`: whole experts, spread over the tensor-parallel ranks."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One local parameter: runs of full tensors end to end along `axis`, zeros after them."""

    name: str
    runs: tuple[Run, ...]
    axis: int
    length: int
    """Extent along `axis`, padding included."""
    width: int | None
    """Extent along the other axis; None for a vector."""
    alias: str | None = None
    """Another name the parameter may have."""
    expert: int | None = None
    """Index along a leading expert axis, where the parameter stacks several experts."""
    num_experts: int = 0
    """Length of that axis."""

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

    def placed_runs(self) -> Iterator[tuple[int, Run]]:
        """Each run with its offset along `axis` in the local parameter."""
        offset = 0
        for run in self.runs:
            yield offset, run
            offset += run.size
