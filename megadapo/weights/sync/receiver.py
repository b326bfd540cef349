"""An engine rank's side of a weight update: slices out of buckets into its own parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from megadapo.errors import WeightError
from megadapo.weights.layout.shards import Shard
from megadapo.weights.sync.buckets import (
    Placed,
    Schedule,
    checksum,
    largest_waves,
    pack,
    parcel_of,
    slice_view,
)
from megadapo.weights.sync.plan import Copy, Plan
from megadapo.weights.sync.transports import Inbox


class Target(Protocol):
    """Where an engine rank's parameters are put."""

    def begin(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor to copy slices of a parameter into; zero where nothing is copied."""
        ...

    def complete(self, name: str, tensor: torch.Tensor) -> None:
        """Every slice of the parameter has arrived."""
        ...


class WeightReceiver:
    """Assembles one engine rank's parameters from the trainer's buckets.

    Args:
        plan: The update's plan.
        shards: The engine rank's shards, from `ModelLayout.engine_shards`.
        engine: Number of the receiver in the plan.
        engine_rank: Rank inside the engine.
        bucket_bytes: Size that the plan is packed for.
        dtype: Type of the engine's parameters, and of the bytes in the buckets.
    """

    def __init__(
        self,
        plan: Plan,
        shards: Iterable[Shard],
        *,
        engine: int,
        engine_rank: int,
        bucket_bytes: int,
        dtype: torch.dtype,
    ) -> None:
        self._plan, self._dtype = plan, dtype
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._expected: Counter[str] = Counter()
        for shard in shards:
            stack = () if shard.expert is None else (shard.num_experts,)
            self._shapes[shard.name] = (*stack, *shard.shape)
            covered = sum(run.size for run in shard.runs)
            self._expected[shard.name] += covered * shard.numel_per_row
        schedule = pack(plan, bucket_bytes)
        self._rounds = _own_rounds(plan, schedule, engine, engine_rank)
        self.largest_wave = largest_waves(schedule).get((engine, engine_rank), 0)
        """Most bytes that this rank receives at once, where it cannot read them in place."""
        self.feeders = {
            placed.transfer.feeder for own in self._rounds.values() for _, placed in own
        }
        """Trainer ranks whose buckets this rank reads; it may not be able to open any other."""
        self.num_bytes = 0

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter of this rank."""
        return self._shapes

    def start(self, target: Target, inbox: Inbox, *, with_checksums: bool) -> None:
        """Begin an update into `target`."""
        self._target, self._inbox = target, inbox
        self._missing = Counter(self._expected)
        self._open: dict[str, torch.Tensor] = {}
        self._copied: dict[str, list[tuple[tuple[int, int, int], Copy]]] = {}
        self._with_checksums = with_checksums
        self._checksums: dict[tuple[int, int, int], tuple[str, int]] = {}
        self.num_bytes = 0
        for name, count in self._expected.items():
            # A rank's part of the vocabulary can be nothing but padding.
            if count == 0:
                target.complete(name, target.begin(name, self._shapes[name]))

    @torch.no_grad()
    def take(self, round_number: int) -> None:
        """Copy this rank's slices out of every bucket of a round."""
        own = self._rounds.get(round_number, [])
        parcels = [parcel_of(self._plan, placed) for _, placed in own]
        fetched = self._inbox.fetch(round_number, parcels)
        for (first, placed), received in zip(own, fetched, strict=True):
            slices = self._plan.slices(placed.transfer)
            for number, (offset, copy) in enumerate(slices, start=first):
                key = (placed.transfer.feeder, round_number, number)
                self._take_slice(received, offset, copy, key)

    def _take_slice(
        self, received: torch.Tensor, offset: int, copy: Copy, key: tuple[int, int, int]
    ) -> None:
        name = copy.target_name
        if name not in self._open:
            self._open[name] = self._target.begin(name, self._shapes[name])
        _region(self._open[name], copy).copy_(slice_view(received, offset, copy, self._dtype))
        self.num_bytes += copy.numel * self._dtype.itemsize
        self._missing[name] -= copy.numel
        if self._with_checksums:
            self._copied.setdefault(name, []).append((key, copy))
        if self._missing[name] == 0:
            self._complete(name)

    def _complete(self, name: str) -> None:
        tensor = self._open.pop(name)
        for key, copy in self._copied.pop(name, ()):
            self._checksums[key] = (name, checksum(_region(tensor, copy)))
        self._target.complete(name, tensor)

    def verify(self, sent: Sequence[Sequence[Sequence[int]]]) -> None:
        """Compare with the trainer's checksums: [feeder][round][slice].

        Raises WeightError that names the first parameters that differ.
        """
        wrong = [
            f"{name} (from trainer rank {feeder}, bucket {round_number})"
            for (feeder, round_number, number), (name, value) in self._checksums.items()
            if sent[feeder][round_number][number] != value
        ]
        if wrong:
            raise WeightError(f"Checksums of trainer and engine differ for {', '.join(wrong[:5])}.")

    def finish(self) -> None:
        """Raise WeightError if a parameter did not arrive in full."""
        missing = [name for name, count in self._missing.items() if count]
        if missing:
            raise WeightError(f"Incomplete weight update: {', '.join(missing[:5])}.")


def _own_rounds(
    plan: Plan, schedule: Schedule, engine: int, engine_rank: int
) -> dict[int, list[tuple[int, Placed]]]:
    """Round -> number of the first slice in its bucket, and place, of what is for this rank, in
    order of the waves."""
    own: dict[int, list[tuple[int, Placed]]] = {}
    for rounds in schedule:
        for round_number, bucket in enumerate(rounds):
            first = 0
            for placed in bucket:
                transfer = placed.transfer
                if (transfer.engine, transfer.engine_rank) == (engine, engine_rank):
                    own.setdefault(round_number, []).append((first, placed))
                first += len(plan.bundle(transfer).copies)
    for placed_slices in own.values():
        placed_slices.sort(key=lambda one: one[1].wave)
    return own


def _region(tensor: torch.Tensor, copy: Copy) -> torch.Tensor:
    """The part of an engine parameter that a copy fills."""
    stacked = tensor if copy.expert is None else tensor[copy.expert]
    return stacked.narrow(copy.axis, copy.target_offset, copy.size)
