"""A trainer rank's side of a weight update: it fills the buckets that the plan assigns to it."""

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
    Capacity,
    Offer,
    PlacedTransfer,
    Schedule,
    capacity_of,
    checksum,
    num_rounds,
    pack,
    relay_batches,
    repack,
    slice_view,
)
from megadapo.weights.sync.delta.state import DeltaState, Encoded
from megadapo.weights.sync.plan import Transfer, UpdatePlan
from megadapo.weights.sync.transports.folder import FolderOutbox, WrittenFile
from megadapo.weights.sync.transports.transports import Outbox, open_outbox


@dataclass(frozen=True, kw_only=True)
class SenderInfo:
    """A trainer rank's position and device, from which the driver plans updates."""

    position: ShardPosition
    layout: ModelLayout
    node: str
    gpu: str | None
    """Name of the rank's GPU on its node; None on a CPU."""


class _Rounds:
    """This rank's part of a schedule."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.own = schedule[rank]
        """Transfers in this rank's bucket of each round."""
        self.relayed = relay_batches(schedule, rank)
        self.last = num_rounds(schedule) - 1


@dataclass(frozen=True)
class _Prepared:
    """The parts that all updates of one plan share on this rank."""

    plan: UpdatePlan
    dtype: torch.dtype
    full: _Rounds
    capacity: Capacity
    outbox: Outbox
    state: DeltaState | None
    """Bits that were sent last, if updates may send only the changes."""


class WeightSender:
    """A writer of slices of this rank's parameters into buckets.

    Args:
        params: Megatron-named parameters of this rank, with global layer numbers; read at every
            update.
        layout: Layout of the model.
        position: Position of this rank in the model.
        rank: This rank's number among the trainer's ranks.
        present: Returns a parameter's weights, which may be offloaded; None: the parameter itself.
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
        self._present = present or (lambda param: param)
        self._prepared: _Prepared | None = None
        self._delta_rounds: _Rounds | None = None
        """Rounds of the present update, if it sends only the changes."""

    def describe(self) -> SenderInfo:
        return SenderInfo(
            position=self._position,
            layout=self._layout,
            node=node_address(),
            gpu=_gpu_name(self._device) if self._device.type == "cuda" else None,
        )

    def prepare(
        self,
        plan: UpdatePlan,
        *,
        bucket_bytes: int,
        dtype: torch.dtype,
        transport: str,
        deltas: bool = False,
        folder: Path | None = None,
    ) -> Offer:
        """Allocate the buckets of a plan and offer them.

        Args:
            deltas: Keep the bits that are sent, so that later updates can send only the changes.
            folder: Folder of update files, for the transport "folder".
        """
        self.close()
        schedule = pack(plan, bucket_bytes)
        capacity = capacity_of(plan, schedule)
        outbox = open_outbox(
            transport,
            capacity.buckets[self._rank],
            device=self._device,
            rank=self._rank,
            num_ranks=plan.num_ranks,
            folder=folder,
        )
        state = DeltaState(dtype.itemsize) if deltas else None
        full = _Rounds(schedule, self._rank)
        self._prepared = _Prepared(plan, dtype, full, capacity, outbox, state)
        return outbox.offer()

    def connect(self, offers: Sequence[Offer | None]) -> None:
        """Connect to the engine ranks, which open the offers at the same time."""
        self._ready.outbox.connect(offers)

    def opened(self) -> None:
        """Note that every receiver has opened the offer."""
        if self._prepared is not None:
            self._prepared.outbox.opened()

    @torch.no_grad()
    def encode(
        self, *, base: int, version: int, max_share: float, with_checksums: bool
    ) -> Encoded | None:
        """Encode the changes of this rank's parameters since they were sent last.

        Returns:
            Sizes of the sections; None if they exceed `max_share` of all bytes.
        """
        ready = self._ready
        assert ready.state is not None, "prepare with deltas"
        return ready.state.encode(
            [transfer for transfer in ready.plan.transfers if transfer.owner == self._rank],
            lambda transfer: self._image(ready, transfer),
            base=base,
            version=version,
            max_share=max_share,
            with_checksums=with_checksums,
        )

    def begin(self, sizes: Sequence[int] | None, version: int = 0) -> None:
        """Start an update.

        Args:
            sizes: Bytes of every transfer of the plan, as the ranks encoded them; None: the update
                sends all weights.
            version: Version of the update.
        """
        ready = self._ready
        if isinstance(ready.outbox, FolderOutbox):
            ready.outbox.begin(version)
        self._delta_rounds = None
        if sizes is not None:
            self._delta_rounds = _Rounds(repack(ready.plan, ready.capacity, sizes), self._rank)
        elif ready.state is not None:
            ready.state.drop_sections()

    @torch.no_grad()
    def fill(self, round_number: int, *, with_checksums: bool = False) -> list[int]:
        """Fill this rank's bucket of a round.

        Collective over the trainer if the plan relays slices between its nodes.

        Returns:
            The checksum of every slice in the bucket, in order, if requested.
        """
        ready = self._ready
        rounds = self._delta_rounds or ready.full
        self._relay(ready, rounds, round_number)
        sums = []
        if round_number < len(rounds.own):
            own = rounds.own[round_number]
            bucket = ready.outbox.bucket(round_number)
            for placed in own:
                if placed.transfer.owner == self._rank:
                    self._put(ready, bucket, placed, placed.offset)
                if with_checksums:
                    sums += _checksums(ready, bucket, placed)
            ready.outbox.post(round_number, [placed.message(ready.plan) for placed in own])
        if ready.state is not None and round_number == rounds.last:
            ready.state.drop_sections()
        return sums

    def written(self) -> dict[str, WrittenFile]:
        """Return the files of the present update; empty for transports without files."""
        outbox = self._ready.outbox
        return outbox.written if isinstance(outbox, FolderOutbox) else {}

    @torch.no_grad()
    def fingerprint(self) -> list[int]:
        """Return the checksum of each parameter of this rank."""
        return [checksum(self._present(param)) for _, param in sorted(self._params.items())]

    def close(self) -> None:
        """Free the buckets."""
        if self._prepared is not None:
            self._prepared.outbox.close()
        self._prepared = self._delta_rounds = None

    @property
    def _ready(self) -> _Prepared:
        assert self._prepared is not None, "prepare first"
        return self._prepared

    def _put(
        self, ready: _Prepared, bucket: torch.Tensor, placed: PlacedTransfer, start: int
    ) -> None:
        """Write a transfer's section or slices into a bucket."""
        target = bucket.narrow(0, start, placed.num_bytes)
        if self._delta_rounds is not None:
            assert ready.state is not None, "begin gets sizes only after encode"
            target.copy_(ready.state.section(placed.transfer))
        elif ready.state is not None:
            target.copy_(self._image(ready, placed.transfer))
            ready.state.keep(placed.transfer, target)
        else:
            self._copy_slices(ready, target, placed.transfer)

    def _image(self, ready: _Prepared, transfer: Transfer) -> torch.Tensor:
        """Return the bits of a bundle as a bucket holds them, with zeros between its slices."""
        num_bytes = ready.plan.bundle(transfer).num_bytes
        image = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        self._copy_slices(ready, image, transfer)
        return image

    def _copy_slices(self, ready: _Prepared, target: torch.Tensor, transfer: Transfer) -> None:
        for offset, copy in ready.plan.slices(transfer):
            param = self._present(self._params[copy.source_name])
            piece = param.narrow(copy.axis, copy.source_offset, copy.size)
            slice_view(target, offset, copy, ready.dtype).copy_(piece)

    def _relay(self, ready: _Prepared, rounds: _Rounds, round_number: int) -> None:
        """Send slices over the trainer's group to ranks that serve engines on other nodes.

        Both sides have space for them in this round's bucket.
        """
        for batch in rounds.relayed.get(round_number, ()):
            bucket = ready.outbox.bucket(round_number)
            operations = [self._relay_one(ready, bucket, placed) for placed in batch]
            works = torch.distributed.batch_isend_irecv(operations) if operations else []
            for work in works:
                work.wait()

    def _relay_one(
        self, ready: _Prepared, bucket: torch.Tensor, placed: PlacedTransfer
    ) -> torch.distributed.P2POp:
        transfer, size = placed.transfer, placed.num_bytes
        if transfer.sender == self._rank:
            target = bucket.narrow(0, placed.offset, size)
            return torch.distributed.P2POp(torch.distributed.irecv, target, transfer.relay)
        assert placed.staged_at is not None, "only transfers with another sender are relayed"
        if not transfer.is_forwarded:
            self._put(ready, bucket, placed, placed.staged_at)
        staged = bucket.narrow(0, placed.staged_at, size)
        return torch.distributed.P2POp(torch.distributed.isend, staged, transfer.sender)


class PinnedWeightSender(WeightSender):
    """A sender of a copy of the weights, which training does not change.

    The copy is in main memory and as large as this rank's parameters. Arguments as for
    `WeightSender`.
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
        super().__init__(params, layout, position, rank, present=present)
        self._live, self._params = self._params, {}

    @torch.no_grad()
    def pin(self) -> None:
        """Replace the copy by the present weights."""
        if not self._params:
            self._params = {
                name: torch.empty(param.shape, dtype=param.dtype)
                for name, param in self._live.items()
            }
        for name, param in self._live.items():
            self._params[name].copy_(self._present(param))


def _checksums(ready: _Prepared, bucket: torch.Tensor, placed: PlacedTransfer) -> list[int]:
    return [
        checksum(slice_view(bucket, offset, copy, ready.dtype))
        for offset, copy in ready.plan.slices(placed.transfer, placed.offset)
    ]


def _gpu_name(device: torch.device) -> str:
    """Return the node's number or UUID of a device, which may have another number here."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    index = device.index or 0
    return visible.split(",")[index] if visible else str(index)
