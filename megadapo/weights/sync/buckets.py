"""Pack transfers into buckets, and compute checksums of their contents.

Every trainer rank fills its own sequence of buckets; bucket k of all ranks makes round k. Sender
and receiver derive the same offsets from the same plan, so no bucket carries a header.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from megadapo.weights.sync.plan import ALIGNMENT, Copy, Transfer, UpdatePlan

NUM_BUCKETS = 2
"""Buckets of a trainer rank; round k uses bucket k % 2."""
LOOK_BACK = 4
"""Rounds before a sender's newest in which gaps are still filled. A larger value would fill few
more gaps, and mix layers that an engine should complete one after the other."""
CHECKSUM_CHUNK = 1 << 16
"""Words summed at once: a checksum takes about 1 MiB of extra memory."""
CHECKSUM_MODULUS = (1 << 61) - 1

Offer = dict[str, Any]
"""Plain values that open a trainer rank's buckets; only the transport that made them reads them."""


@dataclass(frozen=True, slots=True)
class Message:
    """A range of a trainer rank's bucket, and the engine rank it is for."""

    sender: int
    target: int
    """Number of the engine rank among all ranks, the trainer's counted first."""
    offset: int
    num_bytes: int
    wave: int = 0
    """Part of the round that it travels in, if it is sent and not read in place."""


@dataclass(frozen=True, slots=True)
class PlacedTransfer:
    """A transfer and its offsets in the buckets of a round."""

    offset: int
    """Offset in the bucket of the sender."""
    transfer: Transfer
    num_bytes: int
    wave: int
    staged_at: int | None = None
    """Offset in the relay's bucket until the sender has received it, if the sender is not the
    owner."""

    def message(self, plan: UpdatePlan) -> Message:
        """Return the range of bytes of this transfer in its sender's bucket."""
        transfer = self.transfer
        target = plan.engine_rank_number(transfer.engine, transfer.engine_rank)
        return Message(transfer.sender, target, self.offset, self.num_bytes, self.wave)


Schedule = list[list[list[PlacedTransfer]]]
"""[sender][round] -> transfers in the bucket."""

RelayBatches = tuple[list[PlacedTransfer], list[PlacedTransfer]]
"""A rank's relayed transfers of a round, in two batches that it issues and waits for in turn:
first from owners, then between senders of one node."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Memory that ranks have for one round."""

    buckets: list[int]
    """Bytes of a bucket of each trainer rank."""
    waves: dict[tuple[int, int], int]
    """(engine, engine rank) -> bytes that it can receive in one wave."""


def max_bundle_bytes(bucket_bytes: int) -> int:
    """Return the largest bundle to plan for: larger ones would leave buckets half empty."""
    return bucket_bytes // 2


def pack(plan: UpdatePlan, bucket_bytes: int) -> Schedule:
    """Place the transfers of every sender into its buckets, in about the order of the plan.

    A bucket is all the memory that a rank needs in its round: for engine ranks to read, and to
    relay to other senders. So an update takes at most two buckets per rank. An engine rank
    receives at most `bucket_bytes` in one wave of a round.
    """
    sizes = [plan.bundle(transfer).num_bytes for transfer in plan.transfers]
    engines, ranks = range(len(plan.engine.nodes)), range(plan.engine.num_ranks)
    waves = dict.fromkeys(product(engines, ranks), bucket_bytes)
    return _Packer(plan, sizes, Capacity([bucket_bytes] * plan.num_sources, waves)).pack()


def repack(plan: UpdatePlan, capacity: Capacity, sizes: Sequence[int]) -> Schedule:
    """Place the plan's transfers into buckets as `pack` does, with other sizes.

    Args:
        capacity: Capacity of a schedule in which no transfer was smaller than in `sizes`.
        sizes: Bytes of every transfer, in the plan's order; multiples of `ALIGNMENT`.
    """
    return _Packer(plan, sizes, capacity).pack()


class _Packer:
    """Bytes used so far in every bucket and every wave."""

    def __init__(self, plan: UpdatePlan, sizes: Sequence[int], capacity: Capacity) -> None:
        self._plan, self._sizes, self._capacity = plan, sizes, capacity
        self._used: list[list[int]] = [[] for _ in range(plan.num_sources)]
        self._newest = [0] * plan.num_sources
        self._waves: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._schedule: Schedule = [[] for _ in range(plan.num_sources)]

    def pack(self) -> Schedule:
        forwards: dict[tuple[int, int, int], list[Transfer]] = {}
        for transfer in self._plan.transfers:
            if transfer.is_forwarded:
                key = (transfer.relay, transfer.block, transfer.bundle)
                forwards.setdefault(key, []).append(transfer)
        buckets = self._capacity.buckets
        for transfer, size in zip(self._plan.transfers, self._sizes, strict=True):
            largest = min(buckets[transfer.sender], buckets[transfer.owner])
            assert size <= largest, "the plan was made for larger buckets"
            if not transfer.is_forwarded:
                # the sender forwards the content of its bucket in the same round
                key = (transfer.sender, transfer.block, transfer.bundle)
                self._place(transfer, forwards.pop(key, []), size)
        assert not forwards, "a relay forwards only what it has received"
        return self._schedule

    def _place(self, transfer: Transfer, forwards: Sequence[Transfer], size: int) -> None:
        number = self._choose_round([transfer, *forwards], size)
        staged_at = None
        if transfer.owner != transfer.sender:
            staged_at = self._reserve(transfer.owner, number, size)
        offset = self._put(transfer, number, size, staged_at)
        for forward in forwards:
            self._put(forward, number, size, offset)

    def _put(self, transfer: Transfer, number: int, size: int, staged_at: int | None) -> int:
        """Add a transfer to its sender's bucket; return its offset."""
        placed = PlacedTransfer(
            offset=self._reserve(transfer.sender, number, size),
            transfer=transfer,
            num_bytes=size,
            wave=self._choose_wave(transfer, number, size),
            staged_at=staged_at,
        )
        rounds = self._schedule[transfer.sender]
        rounds.extend([] for _ in range(number + 1 - len(rounds)))
        rounds[number].append(placed)
        return placed.offset

    def _choose_round(self, transfers: Sequence[Transfer], size: int) -> int:
        """Return the first recent round in which all buckets have space."""
        senders = [transfer.sender for transfer in transfers]
        ranks = {transfers[0].owner, *senders}
        number = max(0, max(self._newest[sender] for sender in senders) - LOOK_BACK)
        while not all(self._fits(rank, number, size) for rank in ranks):
            number += 1
        for sender in senders:
            self._newest[sender] = max(self._newest[sender], number)
        return number

    def _fits(self, rank: int, number: int, size: int) -> bool:
        used = self._used[rank]
        return number >= len(used) or used[number] + size <= self._capacity.buckets[rank]

    def _reserve(self, rank: int, number: int, size: int) -> int:
        """Reserve bytes in a rank's bucket; return their offset."""
        used = self._used[rank]
        used.extend(0 for _ in range(number + 1 - len(used)))
        used[number] += size
        return used[number] - size

    def _choose_wave(self, transfer: Transfer, number: int, size: int) -> int:
        key = (transfer.engine, transfer.engine_rank, number)
        wave, used = self._waves.get(key, (0, 0))
        if used + size > self._capacity.waves[key[:2]]:
            wave, used = wave + 1, 0
        self._waves[key] = (wave, used + size)
        return wave


def relay_batches(schedule: Schedule, rank: int) -> dict[int, RelayBatches]:
    """Return round -> transfers that a rank sends to or receives from another trainer rank.

    Engines that cannot reach a slice's owner get it from another rank. Both ranks of a relayed
    transfer have it in the same batch, and all transfers of a pair in the same order.
    """
    relayed: dict[int, RelayBatches] = {}
    for number, placed in _placed_by_round(schedule):
        ranks = (placed.transfer.relay, placed.transfer.sender)
        if placed.staged_at is not None and rank in ranks:
            batches = relayed.setdefault(number, ([], []))
            batches[placed.transfer.is_forwarded].append(placed)
    return relayed


def num_rounds(schedule: Schedule) -> int:
    """Return the number of rounds until every sender has emptied its buckets."""
    return max(len(rounds) for rounds in schedule)


def capacity_of(plan: UpdatePlan, schedule: Schedule) -> Capacity:
    """Return the memory that ranks allocate for a schedule, which is no more than it needs."""
    return Capacity(largest_buckets(plan, schedule), largest_waves(schedule))


def largest_buckets(plan: UpdatePlan, schedule: Schedule) -> list[int]:
    """Return the bytes of every rank's fullest bucket."""
    largest = [ALIGNMENT] * plan.num_sources
    for _, placed in _placed_by_round(schedule):
        transfer, size = placed.transfer, placed.num_bytes
        largest[transfer.sender] = max(largest[transfer.sender], placed.offset + size)
        if placed.staged_at is not None:
            largest[transfer.relay] = max(largest[transfer.relay], placed.staged_at + size)
    return largest


def largest_waves(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Return (engine, engine rank) -> bytes of its largest wave."""
    sizes: Counter[tuple[int, int, int, int]] = Counter()
    for number, placed in _placed_by_round(schedule):
        transfer = placed.transfer
        key = (transfer.engine, transfer.engine_rank, number, placed.wave)
        sizes[key] += placed.num_bytes
    largest: dict[tuple[int, int], int] = {}
    for (engine, engine_rank, _, _), size in sizes.items():
        largest[engine, engine_rank] = max(largest.get((engine, engine_rank), 0), size)
    return largest


def _placed_by_round(schedule: Schedule) -> Iterator[tuple[int, PlacedTransfer]]:
    for rounds in schedule:
        for number, bucket in enumerate(rounds):
            for placed in bucket:
                yield number, placed


def slice_view(bucket: torch.Tensor, offset: int, copy: Copy, dtype: torch.dtype) -> torch.Tensor:
    """Return a view of one copy in a bucket of bytes, in the copy's own shape."""
    num_bytes = copy.numel * dtype.itemsize
    return bucket[offset : offset + num_bytes].view(dtype).view(copy.shape)


def checksum(tensor: torch.Tensor) -> int:
    """Return a number that depends on every bit of a tensor and on its position.

    It combines the sum of the 16-bit words and their sum weighted by position. Both are int64 with
    wrap-around, so they are the same on every device.
    """
    words = tensor.contiguous().view(-1).view(torch.int16)
    positions = torch.arange(1, min(len(words), CHECKSUM_CHUNK) + 1, device=words.device)
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    for start in range(0, len(words), CHECKSUM_CHUNK):
        chunk = words[start : start + CHECKSUM_CHUNK].to(torch.int64)
        plain = chunk.sum()
        sums[0] += plain
        sums[1] += chunk.mul_(positions[: len(chunk)]).sum() + start * plain
    total: int
    weighted: int
    total, weighted = sums.tolist()
    return (total * 0x9E3779B1 + weighted) % CHECKSUM_MODULUS
