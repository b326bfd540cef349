"""Pack transfers into buckets, and compute checksums of their contents.

Every trainer rank fills its own sequence of buckets; bucket k of all ranks makes round k. Sender
and receiver derive the same offsets from the same plan, so no bucket carries a header.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch

from megadapo.weights.sync.plan import ALIGNMENT, Copy, Transfer, UpdatePlan
from megadapo.weights.sync.transports.interface import Message

LOOK_BACK = 4
"""Rounds before a sender's newest in which gaps are still filled. A larger value would fill few
more gaps, and mix layers that an engine should complete one after the other."""
CHECKSUM_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Words summed at once, by device; each takes 16 bytes of extra memory.

On a CPU they stay in the cache. On a GPU a step's gigabytes take hundreds of launches, not 200,000.
"""
CHECKSUM_MODULUS = (1 << 61) - 1

RelayBatches = tuple[list["PlacedTransfer"], list["PlacedTransfer"]]
"""A rank's relayed transfers of a round, in two batches that it issues and waits for in turn:
first from owners, then between senders of one node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTransfer(Message):
    """A transfer and its offsets in the buckets of a round."""

    transfer: Transfer
    staged_at: int | None
    """Offset in the relay's bucket until the sender has received it, if the sender is not the
    owner."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Memory that ranks have for one round."""

    buckets: list[int]
    """Bytes of a bucket of each trainer rank."""
    waves: dict[tuple[int, int], int]
    """(receiver, engine rank) -> bytes that it can receive in one wave."""


@dataclass(frozen=True)
class Schedule:
    """The transfers of a plan in the buckets of every trainer rank and round."""

    plan: UpdatePlan
    buckets: list[list[list[PlacedTransfer]]]
    """[sender][round] -> transfers in the bucket."""

    def __iter__(self) -> Iterator[tuple[int, PlacedTransfer]]:
        """Yield every transfer with its round."""
        for rounds in self.buckets:
            for number, bucket in enumerate(rounds):
                for placed in bucket:
                    yield number, placed

    @property
    def num_rounds(self) -> int:
        """Number of rounds until every sender has emptied its buckets."""
        return max(len(rounds) for rounds in self.buckets)

    @cached_property
    def capacity(self) -> Capacity:
        """Memory that ranks allocate, which is no more than the schedule needs."""
        buckets = [ALIGNMENT] * self.plan.num_sources
        received: Counter[tuple[tuple[int, int], int, int]] = Counter()
        for number, placed in self:
            transfer, size = placed.transfer, placed.num_bytes
            buckets[placed.sender] = max(buckets[placed.sender], placed.offset + size)
            if placed.staged_at is not None:
                buckets[transfer.relay] = max(buckets[transfer.relay], placed.staged_at + size)
            received[(transfer.receiver, transfer.engine_rank), number, placed.wave] += size
        waves: dict[tuple[int, int], int] = {}
        for (target, _, _), size in received.items():
            waves[target] = max(waves.get(target, 0), size)
        return Capacity(buckets, waves)

    def repack(self, sizes: Sequence[int]) -> Schedule:
        """Place the transfers into these buckets with other sizes, of which none is larger.

        `sizes`: bytes of every transfer, in the plan's order; multiples of `ALIGNMENT`.
        """
        return _Packer(self.plan, sizes, self.capacity).pack()

    def relay_batches(self, rank: int) -> dict[int, RelayBatches]:
        """Return round -> transfers that a rank sends to or receives from another trainer rank.

        Engines that cannot reach a slice's owner get it from another rank. Both ranks of a relayed
        transfer have it in the same batch, and all transfers of a pair in the same order.
        """
        relayed: dict[int, RelayBatches] = {}
        for number, placed in self:
            if placed.staged_at is not None and rank in (placed.transfer.relay, placed.sender):
                batches = relayed.setdefault(number, ([], []))
                batches[placed.transfer.is_forwarded].append(placed)
        return relayed


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
    receivers, ranks = range(len(plan.engine.nodes)), range(plan.engine.num_ranks)
    waves = dict.fromkeys(product(receivers, ranks), bucket_bytes)
    return _Packer(plan, sizes, Capacity([bucket_bytes] * plan.num_sources, waves)).pack()


class _Packer:
    """Bytes used so far in every bucket and every wave."""

    def __init__(self, plan: UpdatePlan, sizes: Sequence[int], capacity: Capacity) -> None:
        self._plan, self._sizes, self._capacity = plan, sizes, capacity
        self._used: list[list[int]] = [[] for _ in range(plan.num_sources)]
        self._newest = [0] * plan.num_sources
        self._waves: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._placed: list[list[list[PlacedTransfer]]] = [[] for _ in range(plan.num_sources)]

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
        return Schedule(self._plan, self._placed)

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
            sender=transfer.sender,
            target=self._plan.engine_rank_number(transfer.receiver, transfer.engine_rank),
            offset=self._reserve(transfer.sender, number, size),
            num_bytes=size,
            wave=self._choose_wave(transfer, number, size),
            transfer=transfer,
            staged_at=staged_at,
        )
        rounds = self._placed[transfer.sender]
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
        key = (transfer.receiver, transfer.engine_rank, number)
        wave, used = self._waves.get(key, (0, 0))
        if used + size > self._capacity.waves[key[:2]]:
            wave, used = wave + 1, 0
        self._waves[key] = (wave, used + size)
        return wave


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
    size = CHECKSUM_CHUNK[words.device.type]
    positions = torch.arange(1, min(len(words), size) + 1, device=words.device)
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    for start in range(0, len(words), size):
        chunk = words[start : start + size].to(torch.int64)
        plain = chunk.sum()
        sums[0] += plain
        sums[1] += chunk.mul_(positions[: len(chunk)]).sum() + start * plain
    total: int
    weighted: int
    total, weighted = sums.tolist()
    return (total * 0x9E3779B1 + weighted) % CHECKSUM_MODULUS
