"""How transfers are packed into buckets, and how their contents are compared.

Every trainer rank fills its own sequence of buckets; bucket k of all ranks makes round k. Sender
and receiver derive the same places from the same plan, so no bucket carries a header.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megadapo.weights.plan import ALIGNMENT, Copy, Plan, Transfer
from megadapo.weights.transports import Parcel

CHECKSUM_CHUNK = 1 << 20
"""Elements summed at once, which bounds the memory a checksum takes."""
CHECKSUM_MODULUS = (1 << 61) - 1


@dataclass(frozen=True, slots=True)
class Placed:
    """A transfer and its place in the bucket of its feeder."""

    offset: int
    transfer: Transfer


Schedule = list[list[list[Placed]]]
"""[feeder][round] -> what the bucket holds."""


def pack(plan: Plan, bucket_bytes: int) -> Schedule:
    """Lay the transfers of every feeder one after the other into buckets, in plan order."""
    schedule: Schedule = [[] for _ in range(plan.num_sources)]
    used = [bucket_bytes] * plan.num_sources
    for transfer in plan.transfers:
        size = plan.bundle(transfer).num_bytes
        assert size <= bucket_bytes, "the plan was made for larger buckets"
        feeder = transfer.feeder
        if used[feeder] + size > bucket_bytes:
            schedule[feeder].append([])
            used[feeder] = 0
        schedule[feeder][-1].append(Placed(used[feeder], transfer))
        used[feeder] += size
    return schedule


def num_rounds(schedule: Schedule) -> int:
    """Rounds until every feeder has emptied its buckets."""
    return max(len(rounds) for rounds in schedule)


def largest_bucket(plan: Plan, rounds: list[list[Placed]]) -> int:
    """Bytes of a feeder's fullest bucket, which is all that it needs to allocate."""
    ends = [
        placed.offset + plan.bundle(placed.transfer).num_bytes
        for bucket in rounds
        for placed in bucket
    ]
    return max(ends, default=ALIGNMENT)


def parcel_of(plan: Plan, placed: Placed) -> Parcel:
    """The range of bytes that a transfer takes up."""
    transfer = placed.transfer
    target = plan.engine_rank_number(transfer.engine, transfer.engine_rank)
    num_bytes = plan.bundle(transfer).num_bytes
    return Parcel(transfer.feeder, target, placed.offset, num_bytes)


def slice_view(bucket: torch.Tensor, offset: int, copy: Copy, dtype: torch.dtype) -> torch.Tensor:
    """The place of one copy in a bucket of bytes, in the copy's own shape."""
    num_bytes = copy.numel * dtype.itemsize
    return bucket[offset : offset + num_bytes].view(dtype).view(copy.shape)


def checksum(tensor: torch.Tensor) -> int:
    """A number that depends on every bit of a tensor and on its place.

    Exact integer sums, so the same on every device: of the 16-bit words, and of the words
    weighted by their position.
    """
    words = tensor.contiguous().view(-1).view(torch.int16)
    plain = weighted = 0
    for start in range(0, words.numel(), CHECKSUM_CHUNK):
        chunk = words[start : start + CHECKSUM_CHUNK].to(torch.int64)
        positions = torch.arange(1, chunk.numel() + 1, device=chunk.device)
        total = int(chunk.sum())
        plain += total
        weighted += int((chunk * positions).sum()) + start * total
    return (plain * 0x9E3779B1 + weighted) % CHECKSUM_MODULUS
