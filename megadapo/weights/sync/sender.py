"""A trainer rank's side of a weight update: it fills the buckets that the plan gives to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megadapo.cluster.this_node import node_address
from megadapo.weights.disk.load import match_params
from megadapo.weights.layout.layout import ModelLayout
from megadapo.weights.layout.shards import ShardPosition
from megadapo.weights.sync.buckets import (
    Placed,
    Room,
    Schedule,
    checksum,
    num_rounds,
    pack,
    parcel_of,
    repack,
    room_of,
    slice_view,
)
from megadapo.weights.sync.delta.state import Encoded, SentBundles
from megadapo.weights.sync.plan import Plan, Transfer
from megadapo.weights.sync.transports.folder import FolderOutbox, WrittenFile
from megadapo.weights.sync.transports.parcels import Offer
from megadapo.weights.sync.transports.relay import relay_batches
from megadapo.weights.sync.transports.transports import Outbox, open_outbox


@dataclass(frozen=True, kw_only=True)
class SenderInfo:
    """What the driver must know of a trainer rank to plan an update."""

    position: ShardPosition
    layout: ModelLayout
    node: str
    gpu: str | None
    """What its node calls the rank's GPU; None on a CPU."""


class _Rounds:
    """This rank's part of a schedule."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.own = schedule[rank]
        """What this rank's bucket of each round holds."""
        self.relayed = relay_batches(schedule, rank)
        self.last = num_rounds(schedule) - 1


@dataclass(frozen=True)
class _Prepared:
    """What every update of one plan does on this rank."""

    plan: Plan
    dtype: torch.dtype
    full: _Rounds
    room: Room
    outbox: Outbox
    sent: SentBundles | None
    """What was sent last, where updates may send only what changed."""


class WeightSender:
    """Copies slices of this rank's parameters into buckets.

    Args:
        params: Megatron-named parameters of this rank, with global layer numbers; they are read
            where they are, at every update.
        layout: Layout of the model.
        position: What of the model this rank holds.
        rank: This rank's number among the trainer's ranks.
        present: Gives a parameter's weights, wherever they are at the time; None: in itself.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        layout: ModelLayout,
        position: ShardPosition,
        rank: int,
        *,
        present: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        pairs = match_params(params, layout, position)
        self._params = {shard.name: param for shard, param in pairs}
        self._position, self._layout, self._rank = position, layout, rank
        self._device = pairs[0][1].device
        self._present = present or _itself
        self._prepared: _Prepared | None = None
        self._changes: _Rounds | None = None
        """The rounds of the present update, where it sends only what changed."""

    def describe(self) -> SenderInfo:
        """Where this rank stands and runs."""
        return SenderInfo(
            position=self._position,
            layout=self._layout,
            node=node_address(),
            gpu=_gpu_name(self._device) if self._device.type == "cuda" else None,
        )

    def prepare(
        self,
        plan: Plan,
        *,
        bucket_bytes: int,
        dtype: torch.dtype,
        transport: str,
        deltas: bool = False,
        folder: Path | None = None,
    ) -> Offer:
        """Take the plan, allocate buckets and offer them.

        Args:
            deltas: Keep what is sent, so that later updates can send only what changed.
            folder: Where files go, if the transport writes such.
        """
        self.close()
        schedule = pack(plan, bucket_bytes)
        room = room_of(plan, schedule)
        outbox = open_outbox(
            transport,
            room.buckets[self._rank],
            device=self._device,
            rank=self._rank,
            num_ranks=plan.num_ranks,
            folder=folder,
        )
        sent = SentBundles(dtype.itemsize) if deltas else None
        full = _Rounds(schedule, self._rank)
        self._prepared = _Prepared(plan, dtype, full, room, outbox, sent)
        return outbox.offer()

    def connect(self, offers: Sequence[Offer | None]) -> None:
        """Meet the engine ranks, who are opening the offers at the same time."""
        self._ready.outbox.connect(offers)

    def opened(self) -> None:
        """Every receiver has opened the offer."""
        if self._prepared is not None:
            self._prepared.outbox.opened()

    @torch.no_grad()
    def encode(
        self, *, base: int, version: int, max_share: float, with_checksums: bool
    ) -> Encoded | None:
        """Encode what changed in this rank's parameters since they were sent last.

        Returns:
            Sizes of what is to be sent; None where it is more than `max_share` of everything.
        """
        ready = self._ready
        assert ready.sent is not None, "prepare with deltas"
        return ready.sent.encode(
            [transfer for transfer in ready.plan.transfers if transfer.origin == self._rank],
            lambda transfer: self._image(ready, transfer),
            base=base,
            version=version,
            max_share=max_share,
            with_checksums=with_checksums,
        )

    def begin(self, sizes: Sequence[int] | None, version: int = 0) -> None:
        """Choose what the next update sends.

        Args:
            sizes: Bytes of every transfer of the plan, of what the ranks encoded; None: it sends
                all weights as they are.
            version: Of the weights that it leads to.
        """
        ready = self._ready
        if isinstance(ready.outbox, FolderOutbox):
            ready.outbox.begin(version)
        self._changes = None
        if sizes is not None:
            self._changes = _Rounds(repack(ready.plan, ready.room, sizes), self._rank)
        elif ready.sent is not None:
            ready.sent.forget_sections()

    @torch.no_grad()
    def fill(self, round_number: int, *, with_checksums: bool = False) -> list[int]:
        """Fill this rank's bucket of a round.

        Collective over the trainer where the plan relays slices between its nodes.

        Returns:
            The checksum of every slice in the bucket, in order, if asked for.
        """
        ready = self._ready
        rounds = self._changes or ready.full
        self._relay(ready, rounds, round_number)
        sums = []
        if round_number < len(rounds.own):
            own = rounds.own[round_number]
            bucket = ready.outbox.bucket(round_number)
            for placed in own:
                if placed.transfer.origin == self._rank:
                    self._put(ready, bucket, placed, placed.offset)
                if with_checksums:
                    sums += _checksums(ready, bucket, placed)
            ready.outbox.post(round_number, [parcel_of(ready.plan, placed) for placed in own])
        if ready.sent is not None and round_number == rounds.last:
            ready.sent.forget_sections()
        return sums

    def written(self) -> dict[str, WrittenFile]:
        """Files of the present update, where there are such."""
        outbox = self._ready.outbox
        return outbox.written if isinstance(outbox, FolderOutbox) else {}

    @torch.no_grad()
    def fingerprint(self) -> list[int]:
        """Return the checksum of each parameter of this rank."""
        return [checksum(self._present(param)) for _, param in sorted(self._params.items())]

    def close(self) -> None:
        """Give the buckets back."""
        if self._prepared is not None:
            self._prepared.outbox.close()
        self._prepared = self._changes = None

    @property
    def _ready(self) -> _Prepared:
        assert self._prepared is not None, "prepare first"
        return self._prepared

    def _put(self, ready: _Prepared, bucket: torch.Tensor, placed: Placed, start: int) -> None:
        """Write what is sent of a transfer into a bucket."""
        place = bucket.narrow(0, start, placed.num_bytes)
        if self._changes is not None:
            assert ready.sent is not None, "begin has sizes of what was encoded"
            place.copy_(ready.sent.section(placed.transfer))
        elif ready.sent is not None:
            place.copy_(self._image(ready, placed.transfer))
            ready.sent.keep(placed.transfer, place)
        else:
            self._copy_slices(ready, place, placed.transfer)

    def _image(self, ready: _Prepared, transfer: Transfer) -> torch.Tensor:
        """The bits of a bundle as a bucket holds them, with zeros between its slices."""
        num_bytes = ready.plan.bundle(transfer).num_bytes
        image = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        self._copy_slices(ready, image, transfer)
        return image

    def _copy_slices(self, ready: _Prepared, place: torch.Tensor, transfer: Transfer) -> None:
        for offset, copy in ready.plan.slices(transfer):
            param = self._present(self._params[copy.source_name])
            piece = param.narrow(copy.axis, copy.source_offset, copy.size)
            slice_view(place, offset, copy, ready.dtype).copy_(piece)

    def _relay(self, ready: _Prepared, rounds: _Rounds, round_number: int) -> None:
        """Hand slices to the ranks that feed engines on other nodes, over the trainer's group.

        Both sides have a place for them in this round's bucket.
        """
        for batch in rounds.relayed.get(round_number, ()):
            bucket = ready.outbox.bucket(round_number)
            operations = [self._relay_one(ready, bucket, placed) for placed in batch]
            works = torch.distributed.batch_isend_irecv(operations) if operations else []
            for work in works:
                work.wait()

    def _relay_one(
        self, ready: _Prepared, bucket: torch.Tensor, placed: Placed
    ) -> torch.distributed.P2POp:
        transfer, size = placed.transfer, placed.num_bytes
        if transfer.feeder == self._rank:
            place = bucket.narrow(0, placed.offset, size)
            return torch.distributed.P2POp(torch.distributed.irecv, place, transfer.passer)
        assert placed.staged_at is not None, "only what has another feeder is relayed"
        if not transfer.is_forwarded:
            self._put(ready, bucket, placed, placed.staged_at)
        place = bucket.narrow(0, placed.staged_at, size)
        return torch.distributed.P2POp(torch.distributed.isend, place, transfer.feeder)


class HeldWeightSender(WeightSender):
    """Sends weights as they were when they were held, however far training is since.

    The copies are in main memory, once more the size of this rank's parameters.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        layout: ModelLayout,
        position: ShardPosition,
        rank: int,
        *,
        present: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Nothing is held yet; arguments as for `WeightSender`."""
        super().__init__(params, layout, position, rank, present=present)
        self._live, self._params = self._params, {}

    @torch.no_grad()
    def hold(self) -> None:
        """Copy the present weights, in the place of those held before."""
        if not self._params:
            self._params = {
                name: torch.empty(param.shape, dtype=param.dtype)
                for name, param in self._live.items()
            }
        for name, param in self._live.items():
            self._params[name].copy_(self._present(param))


def _itself(param: torch.Tensor) -> torch.Tensor:
    return param


def _checksums(ready: _Prepared, bucket: torch.Tensor, placed: Placed) -> list[int]:
    return [
        checksum(slice_view(bucket, offset, copy, ready.dtype))
        for offset, copy in ready.plan.slices(placed.transfer, placed.offset)
    ]


def _gpu_name(device: torch.device) -> str:
    """The number or UUID by which the node knows a device, whose number here may be another."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    index = device.index or 0
    return visible.split(",")[index] if visible else str(index)
