"""Arithmetic that cuts full tensors into shards; all layouts are made of it.

Every sharded or fused parameter of Megatron and of vLLM is a sequence of runs: ranges of rows (or
columns) of full Hugging Face tensors laid end to end. Interleaved QKV, gate beside up, padded
vocabularies and replicated KV heads differ only in which runs they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megadapo.errors import WeightError


@dataclass(frozen=True, slots=True)
class Run:
    """Positions `start` to `stop` of a full tensor, along the axis its shard is cut on."""

    tensor: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def whole(tensors: Sequence[str], sizes: Sequence[int]) -> list[Run]:
    """Return one run per tensor, each in full."""
    return [Run(tensor, 0, size) for tensor, size in zip(tensors, sizes, strict=True)]


def cut_evenly(runs: Sequence[Run], rank: int, size: int) -> list[Run]:
    """Return part `rank` of `size` equal parts of `runs` laid end to end."""
    total = sum(run.size for run in runs)
    if total % size:
        names = ", ".join(dict.fromkeys(run.tensor for run in runs))
        raise WeightError(f"{names}: {total} cannot be cut into {size} equal parts.")
    return clip(runs, total * rank // size, total * (rank + 1) // size)


def clip(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """Return the part of `runs`, laid end to end, between `start` and `stop`."""
    clipped = []
    offset = 0
    for run in runs:
        low, high = max(start - offset, 0), min(stop - offset, run.size)
        if low < high:
            clipped.append(Run(run.tensor, run.start + low, run.start + high))
        offset += run.size
    return clipped


def cut_each(tensors: Sequence[str], sizes: Sequence[int], rank: int, size: int) -> list[Run]:
    """Return part `rank` of every tensor, in order (gate beside up, vLLM's q, k and v)."""
    return [run for one in whole(tensors, sizes) for run in cut_evenly([one], rank, size)]


def interleave_groups(
    tensors: Sequence[str], sizes: Sequence[int], num_groups: int, rank: int, size: int
) -> list[Run]:
    """Return Megatron's QKV: q, k and v rows of each query group in turn, then cut evenly.

    With fewer groups than ranks a cut is inside a group, as in Megatron.
    """
    runs = []
    for group in range(num_groups):
        for tensor, full in zip(tensors, sizes, strict=True):
            step = full // num_groups
            runs.append(Run(tensor, group * step, (group + 1) * step))
    return cut_evenly(runs, rank, size)


def cut_heads(tensor: str, full: int, num_heads: int, rank: int, size: int) -> list[Run]:
    """Return vLLM's k or v: heads cut evenly, or each head repeated if there are more ranks."""
    if num_heads >= size:
        return cut_evenly([Run(tensor, 0, full)], rank, size)
    if size % num_heads:
        raise WeightError(f"{tensor}: {num_heads} KV heads do not divide {size} engine ranks.")
    head_dim = full // num_heads
    head = rank * num_heads // size
    return [Run(tensor, head * head_dim, (head + 1) * head_dim)]


def stack_heads(
    tensors: Sequence[str], sizes: Sequence[int], num_heads: int, rank: int, size: int
) -> list[Run]:
    """Return vLLM's QKV: q rows cut evenly, then k and v heads."""
    runs = cut_evenly([Run(tensors[0], 0, sizes[0])], rank, size)
    for tensor, full in zip(tensors[1:], sizes[1:], strict=True):
        runs += cut_heads(tensor, full, num_heads, rank, size)
    return runs


def cut_padded(tensor: str, full: int, padded: int, rank: int, size: int) -> list[Run]:
    """Return part `rank` of a vocabulary padded to `padded` rows; padding rows are in no run."""
    if padded % size or padded < full:
        raise WeightError(
            f"{tensor}: {full} rows padded to {padded} cannot be cut into {size} parts."
        )
    return clip([Run(tensor, 0, full)], padded * rank // size, padded * (rank + 1) // size)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
