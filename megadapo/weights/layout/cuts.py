"""Arithmetic that cuts full tensors into shards; all layouts are made of it.

Every sharded or fused parameter of Megatron and of vLLM is a sequence of spans: ranges of rows (or
columns) of full Hugging Face tensors laid end to end. Interleaved QKV, gate beside up, padded
vocabularies and replicated KV heads differ only in which spans they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megadapo.errors import WeightError


@dataclass(frozen=True, slots=True)
class Span:
    """Positions `start` to `stop` of a full tensor, along the axis its shard is cut on."""

    tensor: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def whole(tensors: Sequence[str], sizes: Sequence[int]) -> list[Span]:
    """Return one span per tensor, each in full."""
    return [Span(tensor, 0, size) for tensor, size in zip(tensors, sizes, strict=True)]


def cut_evenly(spans: Sequence[Span], rank: int, size: int) -> list[Span]:
    """Return part `rank` of `size` equal parts of `spans` laid end to end."""
    total = sum(span.size for span in spans)
    if total % size:
        names = ", ".join(dict.fromkeys(span.tensor for span in spans))
        raise WeightError(f"{names}: {total} cannot be cut into {size} equal parts.")
    return clip(spans, total * rank // size, total * (rank + 1) // size)


def clip(spans: Sequence[Span], start: int, stop: int) -> list[Span]:
    """Return the part of `spans`, laid end to end, between `start` and `stop`."""
    clipped = []
    offset = 0
    for span in spans:
        low, high = max(start - offset, 0), min(stop - offset, span.size)
        if low < high:
            clipped.append(Span(span.tensor, span.start + low, span.start + high))
        offset += span.size
    return clipped


def cut_each(tensors: Sequence[str], sizes: Sequence[int], rank: int, size: int) -> list[Span]:
    """Return part `rank` of every tensor, in order (gate beside up, vLLM's q, k and v)."""
    return [span for one in whole(tensors, sizes) for span in cut_evenly([one], rank, size)]


def interleave_groups(
    tensors: Sequence[str], sizes: Sequence[int], num_groups: int, rank: int, size: int
) -> list[Span]:
    """Return Megatron's QKV: q, k and v rows of each query group in turn, then cut evenly.

    With fewer groups than ranks a cut is inside a group, as in Megatron.
    """
    spans = []
    for group in range(num_groups):
        for tensor, full in zip(tensors, sizes, strict=True):
            step = full // num_groups
            spans.append(Span(tensor, group * step, (group + 1) * step))
    return cut_evenly(spans, rank, size)


def cut_heads(tensor: str, full: int, num_heads: int, rank: int, size: int) -> list[Span]:
    """Return vLLM's k or v: heads cut evenly, or each head repeated if there are more ranks."""
    if num_heads >= size:
        return cut_evenly([Span(tensor, 0, full)], rank, size)
    if size % num_heads:
        raise WeightError(f"{tensor}: {num_heads} KV heads do not divide {size} engine ranks.")
    head_dim = full // num_heads
    head = rank * num_heads // size
    return [Span(tensor, head * head_dim, (head + 1) * head_dim)]


def stack_heads(
    tensors: Sequence[str], sizes: Sequence[int], num_heads: int, rank: int, size: int
) -> list[Span]:
    """Return vLLM's QKV: q rows cut evenly, then k and v heads."""
    spans = cut_evenly([Span(tensors[0], 0, sizes[0])], rank, size)
    for tensor, full in zip(tensors[1:], sizes[1:], strict=True):
        spans += cut_heads(tensor, full, num_heads, rank, size)
    return spans


def cut_padded(tensor: str, full: int, padded: int, rank: int, size: int) -> list[Span]:
    """Return part `rank` of a vocabulary padded to `padded` rows; padding rows are in no span."""
    if padded % size or padded < full:
        raise WeightError(
            f"{tensor}: {full} rows padded to {padded} cannot be cut into {size} parts."
        )
    return clip([Span(tensor, 0, full)], padded * rank // size, padded * (rank + 1) // size)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
