"""An engine rank's side of a weight update: it copies slices out of buckets into parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

import torch

from megadapo.errors import WeightError
from megadapo.weights.layout.shards import Shard
from megadapo.weights.sync.buckets import PlacedTransfer, Schedule, checksum, pack, slice_view
from megadapo.weights.sync.delta import Changes, Delta, Stamp, bundle_number, decode
from megadapo.weights.sync.plan import Copy, Transfer, UpdatePlan
from megadapo.weights.sync.transports.in_place import InPlaceInbox
from megadapo.weights.sync.transports.interface import Inbox, Offer, Transport
from megadapo.weights.sync.transports.point_to_point import PointToPointInbox

SliceKey = tuple[int, int, int]
"""Trainer rank, round, and number of the slice in the rank's bucket."""


class Target(Protocol):
    """The destination of an engine rank's parameters."""

    def begin(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor to copy slices of a parameter into; zero in its padding.

        For a delta update, it holds the bits of the previous update.
        """

    def complete(self, name: str, tensor: torch.Tensor) -> None:
        """Load the parameter; all of its slices have arrived."""


class WeightReceiver:
    """The assembly of one engine rank's parameters from the trainer's buckets.

    Args:
        shards: The engine rank's shards, from `ModelLayout.engine_shards`.
        receiver: Number of the receiver in the plan.
        engine_rank: Rank inside the engine.
        bucket_bytes: Bucket size that the plan is packed for.
        dtype: Type of the engine's parameters, and of the bytes in the buckets.
    """

    def __init__(
        self,
        plan: UpdatePlan,
        shards: Iterable[Shard],
        *,
        receiver: int,
        engine_rank: int,
        bucket_bytes: int,
        dtype: torch.dtype,
    ) -> None:
        self._plan, self._dtype = plan, dtype
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._expected: Counter[str] = Counter()
        for shard in shards:
            stack = () if shard.expert is None else (shard.num_experts,)
            self.shapes[shard.name] = (*stack, *shard.shape)
            covered = sum(span.size for span in shard.spans)
            self._expected[shard.name] += covered * shard.numel_per_row
        self._place = (receiver, engine_rank)
        self._full = pack(plan, bucket_bytes)
        self._full_rounds = self._rounds = self._own_rounds(self._full)
        self.num_bytes = 0
        self.version: int | None = None
        """Version of this rank's weights; None during and after an incomplete update."""

    def open_inbox(
        self,
        transport: Transport,
        offers: Sequence[Offer | None],
        device: torch.device,
        *,
        member: int = 0,
    ) -> Inbox:
        """Open the trainer ranks' buckets, given the offer of each.

        `member`: number of this rank's engine among the receiver's engines.
        """
        # other buckets may be on another node, or on a GPU that this process does not see
        senders = {placed.sender for own in self._full_rounds.values() for _, placed in own}
        readable = [offer if number in senders else None for number, offer in enumerate(offers)]
        number = partial(self._plan.engine_rank_number, *self._place)
        if transport in ("shared_memory", "cuda_ipc"):
            return InPlaceInbox(readable, number(), device)
        is_last = member + 1 == self._plan.num_members(self._place[0])
        return PointToPointInbox(
            offers,
            self._full.capacity.waves.get(self._place, 0),
            device if transport == "nccl" else torch.device("cpu"),
            rank=number(member),
            num_ranks=self._plan.num_ranks,
            previous=number(member - 1) if member else None,
            following=None if is_last else number(member + 1),
        )

    def start(
        self,
        target: Target,
        inbox: Inbox,
        *,
        with_checksums: bool,
        version: int = 0,
        delta: Delta | None = None,
    ) -> None:
        """Start an update into `target`.

        Args:
            with_checksums: Whether to keep checksums of all slices for `verify`.
            delta: Header of an update that sends only the changes.
        """
        if delta is not None:
            self.check(delta)
        self._target, self._inbox = target, inbox
        self._rounds, self._next_version, self._delta = self._full_rounds, version, delta
        self._sums: dict[Transfer, int] = {}
        if delta is not None:
            self._rounds = self._own_rounds(self._full.repack(delta.sizes))
            if delta.checksums:
                self._sums = dict(zip(self._plan.transfers, delta.checksums, strict=True))
        self.version = None
        self._is_left_out = False
        self._missing = Counter(self._expected)
        self._open: dict[str, torch.Tensor] = {}
        self._copied: dict[str, list[tuple[SliceKey, Copy]]] = {}
        self._with_checksums = with_checksums
        self._checksums: dict[SliceKey, tuple[str, int]] = {}
        self.num_bytes = 0
        for name, count in self._expected.items():
            # A rank's part of the vocabulary can consist of padding only.
            if count == 0:
                target.complete(name, target.begin(name, self.shapes[name]))

    def check(self, delta: Delta) -> None:
        """Raise WeightError unless the delta's base is this rank's version."""
        if delta.base != self.version:
            raise WeightError(
                f"The update changes version {delta.base}, but the engine has {self.version}."
            )

    @torch.no_grad()
    def take(self, round_number: int) -> bool:
        """Copy this rank's slices out of every bucket of a round.

        Returns:
            False if a trainer rank has ended or left out this engine rank. The driver knows why;
            the update stays incomplete.
        """
        own = self._rounds.get(round_number, [])
        messages = [placed for _, placed in own]
        if not self._inbox.wait(messages):
            return False
        contents = self._inbox.receive(round_number, messages)
        try:
            for (first, placed), received in zip(own, contents, strict=True):
                if placed.num_bytes < self._plan.bundle(placed.transfer).num_bytes:
                    self._change(received, placed.transfer)
                else:
                    self._replace(received, placed.transfer, round_number, first)
        except ConnectionError:
            self._is_left_out = True
        return not self._is_left_out

    def _own_rounds(self, schedule: Schedule) -> dict[int, list[tuple[int, PlacedTransfer]]]:
        """Return round -> this rank's transfers by wave, each with its first slice number."""
        own: dict[int, list[tuple[int, PlacedTransfer]]] = {}
        first: Counter[tuple[int, int]] = Counter()
        for round_number, placed in schedule:
            transfer = placed.transfer
            if (transfer.receiver, transfer.engine_rank) == self._place:
                number = first[placed.sender, round_number]
                own.setdefault(round_number, []).append((number, placed))
            first[placed.sender, round_number] += len(self._plan.bundle(transfer).copies)
        for placed_slices in own.values():
            placed_slices.sort(key=lambda one: one[1].wave)
        return own

    def _replace(
        self, received: torch.Tensor, transfer: Transfer, round_number: int, first: int
    ) -> None:
        """Copy all slices of a transfer; `first` is the number of its first slice."""
        regions = []
        for number, (offset, copy) in enumerate(self._plan.slices(transfer), start=first):
            regions.append(self._region(copy))
            regions[-1].copy_(slice_view(received, offset, copy, self._dtype))
            self.num_bytes += copy.numel * self._dtype.itemsize
            if self._with_checksums:
                key = (transfer.sender, round_number, number)
                self._copied.setdefault(copy.target_name, []).append((key, copy))
            self._arrived(copy)
        self._compare(transfer, regions)

    def _change(self, section: torch.Tensor, transfer: Transfer) -> None:
        """Write the elements that a section changes, all or none."""
        assert self._delta is not None, "only a delta update sends less than a bundle"
        itemsize = self._plan.itemsize
        stamp = Stamp(self._delta.base, self._next_version, bundle_number(transfer))
        num_elements = self._plan.bundle(transfer).num_bytes // itemsize
        changes = decode(section, stamp, itemsize=itemsize, num_elements=num_elements)
        slices = list(self._plan.slices(transfer))
        starts = [(offset // itemsize, copy.numel) for offset, copy in slices]
        parts = changes.split([(start, start + count) for start, count in starts])
        regions = []
        for part, (_, copy) in zip(parts, slices, strict=True):
            regions.append(self._region(copy))
            change_in_place(regions[-1], part)
            self._arrived(copy)
        self.num_bytes += len(section)
        self._compare(transfer, regions)

    def _compare(self, transfer: Transfer, regions: Sequence[torch.Tensor]) -> None:
        """Raise WeightError unless a transfer's regions have the trainer's bits."""
        if transfer not in self._sums:
            return
        slices = list(self._plan.slices(transfer))
        num_bytes = self._plan.bundle(transfer).num_bytes
        image = torch.zeros(num_bytes, dtype=torch.uint8, device=regions[0].device)
        for (offset, copy), region in zip(slices, regions, strict=True):
            slice_view(image, offset, copy, self._dtype).copy_(region)
        if checksum(image) != self._sums[transfer]:
            names = ", ".join(dict.fromkeys(copy.target_name for _, copy in slices))
            raise WeightError(
                f"Checksums of trainer and engine differ for {names} (from trainer rank "
                f"{transfer.owner}, after a delta update)."
            )

    def _region(self, copy: Copy) -> torch.Tensor:
        """Return the part of this rank's parameter that a copy fills."""
        name = copy.target_name
        if name not in self._open:
            self._open[name] = self._target.begin(name, self.shapes[name])
        return _region(self._open[name], copy)

    def _arrived(self, copy: Copy) -> None:
        """Complete the parameter if this was its last slice."""
        name = copy.target_name
        self._missing[name] -= copy.numel
        if self._missing[name] == 0:
            tensor = self._open.pop(name)
            for key, part in self._copied.pop(name, ()):
                self._checksums[key] = (name, checksum(_region(tensor, part)))
            self._target.complete(name, tensor)

    def verify(self, sent: Sequence[Sequence[Sequence[int]]]) -> None:
        """Compare with the trainer's checksums: [sender][round][slice].

        Raises WeightError that names the first parameters that differ.
        """
        wrong = [
            f"{name} (from trainer rank {sender}, bucket {round_number})"
            for (sender, round_number, number), (name, value) in self._checksums.items()
            if sent[sender][round_number][number] != value
        ]
        if wrong:
            raise WeightError(f"Checksums of trainer and engine differ for {', '.join(wrong[:5])}.")

    def finish(self) -> None:
        """Raise WeightError if a parameter is incomplete or may have bits of a later round."""
        if self._is_left_out:
            raise WeightError("A trainer rank has ended, or left out this engine rank as too slow.")
        missing = [name for name, count in self._missing.items() if count]
        if missing:
            raise WeightError(f"Incomplete weight update: {', '.join(missing[:5])}.")
        self.version = self._next_version


def change_in_place(region: torch.Tensor, changes: Changes) -> None:
    """Change elements of a parameter's region in place; elements are numbered row by row."""
    if not len(changes.indices):
        return
    here = changes.to(region.device)
    # the memory from the region's first element to its last, including gaps between its rows
    steps = zip(region.shape, region.stride(), strict=True)
    extent = 1 + sum((size - 1) * step for size, step in steps)
    memory = region.as_strided((extent,), (1,)).view(here.bits.dtype)
    index = here.indices
    if not region.is_contiguous():
        width = region.shape[1]
        rows = here.indices.div(width, rounding_mode="floor")
        index = rows * region.stride(0) + (here.indices - rows * width) * region.stride(1)
    memory[index] = here.after(memory[index])


def _region(tensor: torch.Tensor, copy: Copy) -> torch.Tensor:
    stacked = tensor if copy.expert is None else tensor[copy.expert]
    return stacked.narrow(copy.axis, copy.target_offset, copy.size)
