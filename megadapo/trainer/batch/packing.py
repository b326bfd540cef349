"""The layout of a packed micro-batch's sequences, for our own attention.

Sequences of similar length are padded to a causal batch of their own, so attention needs no mask
over the whole micro-batch. Memory and work grow with the square of each sequence's length, not of
their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass(frozen=True)
class ContextPart:
    """The part of every sequence that rank `rank` of `size` context-parallel ranks has.

    A sequence is padded to a multiple of 2 x CP tokens and divided into as many equal chunks. Rank
    r has chunks r and 2 x CP - 1 - r: an early one that attends to few tokens and a late one that
    attends to many, so all ranks do equal work. megatron-core and Transformer Engine assume this
    order.
    """

    rank: int
    size: int

    @property
    def chunks_per_sequence(self) -> int:
        """Divisor of the length of every packed sequence."""
        return 2 * self.size if self.size > 1 else 1

    def places(self, lengths: Sequence[int]) -> np.ndarray:
        """Return [T] int64: indices of the rank's tokens among all ranks' tokens, ascending.

        `lengths`: of the packed sequences, each a multiple of `chunks_per_sequence`.
        """
        if self.size == 1:
            return np.arange(sum(lengths))
        pieces, start = [np.empty(0, dtype=np.int64)], 0
        for length in lengths:
            chunk, rest = divmod(length, self.chunks_per_sequence)
            assert not rest, "sequences are padded before they are divided"
            for number in (self.rank, self.chunks_per_sequence - 1 - self.rank):
                pieces.append(np.arange(start + number * chunk, start + (number + 1) * chunk))
            start += length
        return np.concatenate(pieces)


WHOLE_SEQUENCES = ContextPart(0, 1)
"""The part of a rank without context parallelism: every sequence is whole."""


SHORT_SEQUENCE = 32
"""Sequences up to this length share a bucket: the padding costs less than another call."""
MIN_LENGTH_SHARE = 0.75
"""A longer sequence joins a bucket if its length is at least this share of the longest one's."""


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, padded to one length; a buffer has one bucket after another."""

    num_sequences: int
    length: int


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]  # megatron-core has no types
    """Bounds of the sequences, plus tensors that our own layers need."""

    cos: Tensor | None = None  # [T, D / 2] of the rotary embedding
    sin: Tensor | None = None  # [T, D / 2]
    buckets: tuple[Bucket, ...] = ()
    padded_rows: Tensor | None = None  # [T] row of token t in the padded buffer
    token_of_row: Tensor | None = None  # [padded rows] the token there; 0 in the gaps
    key_rows: Tensor | None = None
    """Rows as in `padded_rows`, [CP x T], of all context-parallel ranks' tokens in rank order."""
    key_of_row: Tensor | None = (
        None  # [padded rows] same as `token_of_row`, for the tokens of all ranks
    )

    def to(self, device: torch.device) -> PackedSequences:
        """Return a copy with every tensor on the device."""
        return replace(self, **tensors_on(self, device))


def tensors_on(holder: Any, device: torch.device) -> dict[str, Any]:
    """Return the tensor fields of a dataclass object, copied to the device."""
    values = {field.name: getattr(holder, field.name) for field in fields(holder) if field.init}
    return {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}


def pack_sequences(
    lengths: list[int],
    inverse_frequencies: Tensor | None,
    part: ContextPart = WHOLE_SEQUENCES,
) -> PackedSequences:
    """Lay out sequences of the given lengths (all positive), packed in this order, on the host.

    `inverse_frequencies`: [D / 2] of the rotary embedding; None omits what our own layers need.
    """
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    packed = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    if inverse_frequencies is None:
        return packed
    buckets, first_rows = _buckets(lengths)
    num_padded_rows = sum(bucket.num_sequences * bucket.length for bucket in buckets)
    positions = np.concatenate([np.arange(n) for n in lengths])
    rows = torch.from_numpy(np.repeat(first_rows, lengths) + positions)
    own = part.places(lengths)
    own_rows = rows[own]
    token_of_row = _tokens_of_rows(own_rows, num_padded_rows)
    key_rows, key_of_row = own_rows, token_of_row
    if part.size > 1:
        places = [ContextPart(rank, part.size).places(lengths) for rank in range(part.size)]
        key_rows = rows[np.concatenate(places)]
        key_of_row = _tokens_of_rows(key_rows, num_padded_rows)
    packed = with_rotary(packed, inverse_frequencies, part)
    return replace(
        packed,
        buckets=buckets,
        padded_rows=own_rows,
        token_of_row=token_of_row,
        key_rows=key_rows,
        key_of_row=key_of_row,
    )


def with_rotary(
    packed: PackedSequences, inverse_frequencies: Tensor, part: ContextPart = WHOLE_SEQUENCES
) -> PackedSequences:
    """Return the sequences with cosine and sine of a rotary embedding [D / 2], on their device."""
    lengths = packed.cu_seqlens_q.diff().tolist()
    positions = np.concatenate([np.arange(n) for n in lengths])[part.places(lengths)]
    angles = torch.outer(torch.from_numpy(positions).float(), inverse_frequencies.cpu())
    device = packed.cu_seqlens_q.device
    return replace(packed, cos=angles.cos().to(device), sin=angles.sin().to(device))


def _tokens_of_rows(rows: Tensor, num_padded_rows: int) -> Tensor:
    tokens = torch.zeros(num_padded_rows, dtype=torch.int64)
    tokens[rows] = torch.arange(len(rows))
    return tokens


def _buckets(lengths: list[int]) -> tuple[tuple[Bucket, ...], np.ndarray]:
    """Return the buckets in order, and each sequence's first row in the padded buffer."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    members: list[list[int]] = []
    for index in order:
        longest = lengths[members[-1][0]] if members else 0
        joins = lengths[index] >= MIN_LENGTH_SHARE * longest or longest <= SHORT_SEQUENCE
        if members and joins:
            members[-1].append(index)
        else:
            members.append([index])
    buckets = tuple(Bucket(len(bucket), lengths[bucket[0]]) for bucket in members)
    padded = np.repeat([b.length for b in buckets], [b.num_sequences for b in buckets])
    first_rows = np.empty(len(lengths), dtype=np.int64)
    first_rows[order] = np.cumsum(padded) - padded
    return buckets, first_rows


class _ToPadded(torch.autograd.Function):
    """Maps x [T, ...] to [padded rows, ...]; rows in gaps get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, token_of_row: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        # one pass over memory; zeros in the gaps would take two
        return x.index_select(0, token_of_row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return grad.index_select(0, rows), None, None


class _FromPadded(torch.autograd.Function):
    """Maps padded [num_rows, ...] back to [T, ...]."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = padded.shape[0]
        return padded.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        padded = grad.new_zeros(ctx.num_rows, *grad.shape[1:])
        return padded.index_copy_(0, rows, grad), None


to_padded: Callable[[Tensor, Tensor, Tensor], Tensor] = _ToPadded.apply
from_padded: Callable[[Tensor, Tensor], Tensor] = _FromPadded.apply
