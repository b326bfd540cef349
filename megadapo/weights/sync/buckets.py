"""How transfers are packed into buckets, and how their contents are compared.

Every trainer rank fills its own sequence of buckets; bucket k of all ranks makes round k. Sender
and receiver derive the same places from the same plan, so no bucket carries a header.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch

from megadapo.weights.sync.plan import ALIGNMENT, Copy, Plan, Transfer
from megadapo.weights.sync.transports.parcels import Parcel

LOOK_BACK = 4
"""Rounds before a feeder's newest in which gaps are still filled. More would fill few gaps and
mix layers that an engine should complete one after the other."""
CHECKSUM_CHUNK = 1 << 16
"""Words summed at once: a checksum takes about 1 MiB beside what it is of."""
CHECKSUM_MODULUS = (1 << 61) - 1


@dataclass(frozen=True, slots=True)
class Placed:
    """A transfer and its places in the buckets of a round."""

    offset: int
    """In the bucket of the feeder."""
    transfer: Transfer
    num_bytes: int
    wave: int
    """Which part of the round it travels in, where it is sent and not read in place."""
    staged_at: int | None = None
    """In the bucket of the passer, where the feeder is not the origin, until the feeder has it."""


Schedule = list[list[list[Placed]]]
"""[feeder][round] -> what the bucket holds for engine ranks."""


def piece_bytes(bucket_bytes: int) -> int:
    """Largest bundle to plan for: larger ones would leave much of every bucket empty."""
    return bucket_bytes // 2


def pack(plan: Plan, bucket_bytes: int) -> Schedule:
    """Lay the transfers of every feeder into its buckets, in about the order of the plan.

    A bucket is all the memory that a rank needs in its round: it holds what engine ranks read and
    what the rank hands to other feeders. So an update never takes more than the two buckets that
    are in flight. An engine rank receives at most `bucket_bytes` in one wave of a round.
    """
    sizes = [plan.bundle(transfer).num_bytes for transfer in plan.transfers]
    engines, ranks = range(len(plan.engine.nodes)), range(plan.engine.num_ranks)
    waves = dict.fromkeys(product(engines, ranks), bucket_bytes)
    return _Packer(plan, sizes, Room([bucket_bytes] * plan.num_sources, waves)).pack()


@dataclass(frozen=True, slots=True)
class Room:
    """How much ranks can hold at once."""

    buckets: list[int]
    """Bytes of a bucket of each trainer rank."""
    waves: dict[tuple[int, int], int]
    """(engine, engine rank) -> bytes that it can receive in one wave."""


def room_of(plan: Plan, schedule: Schedule) -> Room:
    """What ranks have allocated for a schedule, where each allocates no more than it needs."""
    return Room(largest_buckets(plan, schedule), largest_waves(schedule))


def repack(plan: Plan, room: Room, sizes: Sequence[int]) -> Schedule:
    """Lay the plan's transfers into buckets as `pack` does, with the sizes that they have now.

    Args:
        room: Of a schedule in which no transfer was smaller than it is now.
        sizes: Bytes of every transfer, in the plan's order; multiples of `ALIGNMENT`.
    """
    return _Packer(plan, sizes, room).pack()


class _Packer:
    """How full every bucket and every wave is so far."""

    def __init__(self, plan: Plan, sizes: Sequence[int], room: Room) -> None:
        self._plan, self._sizes, self._room = plan, sizes, room
        self._used: list[list[int]] = [[] for _ in range(plan.num_sources)]
        self._newest = [0] * plan.num_sources
        self._waves: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._schedule: Schedule = [[] for _ in range(plan.num_sources)]

    def pack(self) -> Schedule:
        forwards: dict[tuple[int, int, int], list[Transfer]] = {}
        for transfer in self._plan.transfers:
            if transfer.is_forwarded:
                forwards.setdefault(_bucket_key(transfer, transfer.passer), []).append(transfer)
        for transfer, size in zip(self._plan.transfers, self._sizes, strict=True):
            room = self._room.buckets
            largest = min(room[transfer.feeder], room[transfer.origin])
            assert size <= largest, "the plan was made for larger buckets"
            if not transfer.is_forwarded:
                # what the feeder's bucket holds is handed on in the same round
                key = _bucket_key(transfer, transfer.feeder)
                self._place(transfer, forwards.pop(key, []), size)
        assert not forwards, "a rank hands on what it does not get"
        return self._schedule

    def _place(self, transfer: Transfer, forwards: Sequence[Transfer], size: int) -> None:
        number = self._choose_round([transfer, *forwards], size)
        staged_at = None
        if transfer.origin != transfer.feeder:
            staged_at = self._reserve(transfer.origin, number, size)
        offset = self._put(transfer, number, size, staged_at)
        for forward in forwards:
            self._put(forward, number, size, offset)

    def _put(self, transfer: Transfer, number: int, size: int, staged_at: int | None) -> int:
        """Note a transfer's place in its feeder's bucket."""
        placed = Placed(
            offset=self._reserve(transfer.feeder, number, size),
            transfer=transfer,
            num_bytes=size,
            wave=self._choose_wave(transfer, number, size),
            staged_at=staged_at,
        )
        rounds = self._schedule[transfer.feeder]
        rounds.extend([] for _ in range(number + 1 - len(rounds)))
        rounds[number].append(placed)
        return placed.offset

    def _choose_round(self, transfers: Sequence[Transfer], size: int) -> int:
        """The first round not long past in which all buckets have room."""
        feeders = [transfer.feeder for transfer in transfers]
        ranks = {transfers[0].origin, *feeders}
        number = max(0, max(self._newest[feeder] for feeder in feeders) - LOOK_BACK)
        while not all(self._has_room(rank, number, size) for rank in ranks):
            number += 1
        for feeder in feeders:
            self._newest[feeder] = max(self._newest[feeder], number)
        return number

    def _has_room(self, rank: int, number: int, size: int) -> bool:
        used = self._used[rank]
        return number >= len(used) or used[number] + size <= self._room.buckets[rank]

    def _reserve(self, rank: int, number: int, size: int) -> int:
        """Offset of so many more bytes in the rank's bucket."""
        used = self._used[rank]
        used.extend(0 for _ in range(number + 1 - len(used)))
        used[number] += size
        return used[number] - size

    def _choose_wave(self, transfer: Transfer, number: int, size: int) -> int:
        key = (transfer.engine, transfer.engine_rank, number)
        wave, used = self._waves.get(key, (0, 0))
        if used + size > self._room.waves[key[:2]]:
            wave, used = wave + 1, 0
        self._waves[key] = (wave, used + size)
        return wave


def _bucket_key(transfer: Transfer, rank: int) -> tuple[int, int, int]:
    """What of the model lies in a rank's bucket."""
    return rank, transfer.block, transfer.bundle


def num_rounds(schedule: Schedule) -> int:
    """Rounds until every feeder has emptied its buckets."""
    return max(len(rounds) for rounds in schedule)


def largest_buckets(plan: Plan, schedule: Schedule) -> list[int]:
    """Bytes of every rank's fullest bucket, which is all that it needs to allocate (twice)."""
    largest = [ALIGNMENT] * plan.num_sources
    for placed in (one for rounds in schedule for bucket in rounds for one in bucket):
        transfer, size = placed.transfer, placed.num_bytes
        largest[transfer.feeder] = max(largest[transfer.feeder], placed.offset + size)
        if placed.staged_at is not None:
            largest[transfer.passer] = max(largest[transfer.passer], placed.staged_at + size)
    return largest


def largest_waves(schedule: Schedule) -> dict[tuple[int, int], int]:
    """(engine, engine rank) -> most bytes that it receives at once."""
    sizes: Counter[tuple[int, int, int, int]] = Counter()
    for rounds in schedule:
        for number, bucket in enumerate(rounds):
            for placed in bucket:
                to = placed.transfer
                key = (to.engine, to.engine_rank, number, placed.wave)
                sizes[key] += placed.num_bytes
    largest: dict[tuple[int, int], int] = {}
    for (engine, engine_rank, _, _), size in sizes.items():
        largest[engine, engine_rank] = max(largest.get((engine, engine_rank), 0), size)
    return largest


def parcel_of(plan: Plan, placed: Placed) -> Parcel:
    """The range of bytes that a transfer takes up."""
    transfer = placed.transfer
    target = plan.engine_rank_number(transfer.engine, transfer.engine_rank)
    return Parcel(transfer.feeder, target, placed.offset, placed.num_bytes, placed.wave)


def slice_view(bucket: torch.Tensor, offset: int, copy: Copy, dtype: torch.dtype) -> torch.Tensor:
    """The place of one copy in a bucket of bytes, in the copy's own shape."""
    num_bytes = copy.numel * dtype.itemsize
    return bucket[offset : offset + num_bytes].view(dtype).view(copy.shape)


def checksum(tensor: torch.Tensor) -> int:
    """A number that depends on every bit of a tensor and on its place.

    Integer sums that wrap around at 64 bits, so the same on every device: of the 16-bit words, and
    of the words weighted by their position.
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
