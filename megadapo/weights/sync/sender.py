"""A trainer rank's side of a weight update: it fills the buckets that the plan assigns to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megadapo.cluster.this_node import node_address
from megadapo.weights.disk.sources import match_params
from megadapo.weights.host_memory import HostMemory
from megadapo.weights.layout.layout import ModelLayout
from megadapo.weights.layout.shards import ShardPosition
from megadapo.weights.sync.buckets import PlacedTransfer, Schedule, checksum, pack, slice_view
from megadapo.weights.sync.delta import DeltaState, Encoded
from megadapo.weights.sync.plan import Transfer, UpdatePlan
from megadapo.weights.sync.transports.in_place import CudaIpcOutbox, SharedMemoryOutbox
from megadapo.weights.sync.transports.interface import Offer, Outbox, Transport
from megadapo.weights.sync.transports.point_to_point import PointToPointOutbox


@dataclass(frozen=True, kw_only=True)
class SenderInfo:
    """A trainer rank's position and device, from which the driver plans updates."""

    position: ShardPosition
    layout: ModelLayout
    node: str
    gpu: str | None
    """Name of the rank's GPU on its node; None on a CPU."""


class WeightSender:
    """A writer of slices of this rank's parameters into buckets.

    The driver calls `prepare` first, and again for each new plan.

    Args:
        params: Megatron-named parameters of this rank, with global layer numbers; read at every
            update.
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
        self._memory = HostMemory(pinned=self._device.type == "cuda")
        self._pinned: dict[str, torch.Tensor] | None = None
        self._outbox: Outbox | None = None

    def describe(self) -> SenderInfo:
        gpu = None
        if self._device.type == "cuda":
            # on the node it may have another number, or is named by its UUID
            index, visible = self._device.index or 0, os.environ.get("CUDA_VISIBLE_DEVICES")
            gpu = visible.split(",")[index] if visible else str(index)
        return SenderInfo(
            position=self._position, layout=self._layout, node=node_address(), gpu=gpu
        )

    def prepare(
        self,
        plan: UpdatePlan,
        *,
        bucket_bytes: int,
        dtype: torch.dtype,
        transport: Transport,
        deltas: bool = False,
        patience_s: float = 60.0,
    ) -> Offer:
        """Allocate the buckets of a plan and offer them.

        Args:
            deltas: Keep the bits that are sent, so that later updates can send only the changes.
            patience_s: Seconds after which an engine that does not read a bucket is left out.
        """
        if self._outbox is not None:
            self._outbox.close()
        self._plan, self._dtype = plan, dtype
        self._full = pack(plan, bucket_bytes)
        self._use(self._full)
        self._sends_changes = False
        # bits that were sent last, if updates may send only the changes
        self._state = DeltaState(dtype.itemsize) if deltas else None
        self._outbox = self._open_outbox(transport, patience_s)
        return self._outbox.offer()

    def _open_outbox(self, transport: Transport, patience_s: float) -> Outbox:
        num_bytes = self._full.capacity.buckets[self._rank]
        if transport == "shared_memory":
            return SharedMemoryOutbox(num_bytes, patience_s)
        if transport == "cuda_ipc":
            return CudaIpcOutbox(num_bytes, self._device, patience_s)
        where = self._device if transport == "nccl" else torch.device("cpu")
        return PointToPointOutbox(num_bytes, where, rank=self._rank, num_ranks=self._plan.num_ranks)

    def _use(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._relayed = schedule.relay_batches(self._rank)

    def connect(self, offers: Sequence[Offer | None]) -> None:
        """Connect to the engine ranks, which open the offers at the same time."""
        self._buckets.connect(offers)

    def opened(self) -> None:
        """Note that every receiver has opened the offer."""
        self._buckets.opened()

    @torch.no_grad()
    def encode(
        self, *, base: int, version: int, max_share: float, with_checksums: bool
    ) -> Encoded | None:
        """Encode the changes of this rank's parameters since they were sent last.

        Return sizes of the sections; None if they exceed `max_share` of all bytes.
        """
        assert self._state is not None, "prepare with deltas"
        return self._state.encode(
            [transfer for transfer in self._plan.transfers if transfer.owner == self._rank],
            self._image,
            base=base,
            version=version,
            max_share=max_share,
            with_checksums=with_checksums,
        )

    def begin(self, sizes: Sequence[int] | None) -> None:
        """Start an update.

        `sizes`: bytes of every transfer of the plan, as the ranks encoded them; None: the update
        sends all weights.
        """
        self._sends_changes = sizes is not None
        self._use(self._full if sizes is None else self._full.repack(sizes))
        if sizes is None and self._state is not None:
            self._state.drop_sections()

    def fill_rounds(self, rounds: Sequence[int], *, with_checksums: bool) -> list[list[int]]:
        """Fill the buckets of several rounds, each when its readers have read the bucket before."""
        return [self.fill(number, with_checksums=with_checksums) for number in rounds]

    @torch.no_grad()
    def fill(self, round_number: int, *, with_checksums: bool = False) -> list[int]:
        """Fill this rank's bucket of a round; return the checksum of every slice if requested.

        Collective over the trainer if the plan relays slices between its nodes.
        """
        self._relay(round_number)
        sums = []
        own = self._schedule.buckets[self._rank]
        if round_number < len(own):
            bucket = self._buckets.bucket(round_number)
            for placed in own[round_number]:
                if placed.transfer.owner == self._rank:
                    self._put(bucket, placed, placed.offset)
                if with_checksums:
                    sums += [
                        checksum(slice_view(bucket, offset, copy, self._dtype))
                        for offset, copy in self._plan.slices(placed.transfer, placed.offset)
                    ]
            self._buckets.post(round_number, own[round_number])
        if self._state is not None and round_number == self._schedule.num_rounds - 1:
            self._state.drop_sections()
        return sums

    @torch.no_grad()
    def fingerprint(self) -> list[int]:
        """Return the checksum of each parameter of this rank."""
        return [checksum(self._weights_of(name)) for name in sorted(self._params)]

    @torch.no_grad()
    def pin(self) -> None:
        """Copy the present weights; later updates send the copy, which training does not change.

        The copy is in main memory, which stays allocated, and as large as this rank's parameters.
        """
        self._memory.reset()
        with self._memory.copying() as copy:
            self._pinned = {
                name: copy(self._present(param)) for name, param in self._params.items()
            }

    def _weights_of(self, name: str) -> torch.Tensor:
        return self._present(self._params[name]) if self._pinned is None else self._pinned[name]

    @property
    def _buckets(self) -> Outbox:
        assert self._outbox is not None, "prepare first"
        return self._outbox

    def _put(self, bucket: torch.Tensor, placed: PlacedTransfer, start: int) -> None:
        """Write a transfer's section or slices into a bucket."""
        target = bucket.narrow(0, start, placed.num_bytes)
        if self._state is None:
            self._copy_slices(target, placed.transfer)
        elif self._sends_changes:
            target.copy_(self._state.section(placed.transfer))
        else:
            target.copy_(self._image(placed.transfer))
            self._state.keep(placed.transfer, target)

    def _image(self, transfer: Transfer) -> torch.Tensor:
        """Return the bits of a bundle as a bucket holds them, with zeros between its slices."""
        num_bytes = self._plan.bundle(transfer).num_bytes
        image = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        self._copy_slices(image, transfer)
        return image

    def _copy_slices(self, target: torch.Tensor, transfer: Transfer) -> None:
        for offset, copy in self._plan.slices(transfer):
            weights = self._weights_of(copy.source_name)
            piece = weights.narrow(copy.axis, copy.source_offset, copy.size)
            slice_view(target, offset, copy, self._dtype).copy_(piece)

    def _relay(self, round_number: int) -> None:
        """Send slices over the trainer's group to ranks that serve engines on other nodes.

        Both sides have space for them in this round's bucket.
        """
        for batch in self._relayed.get(round_number, ()):
            bucket = self._buckets.bucket(round_number)
            operations = [self._relay_one(bucket, placed) for placed in batch]
            works = torch.distributed.batch_isend_irecv(operations) if operations else []
            for work in works:
                work.wait()

    def _relay_one(self, bucket: torch.Tensor, placed: PlacedTransfer) -> torch.distributed.P2POp:
        transfer, size = placed.transfer, placed.num_bytes
        if transfer.sender == self._rank:
            target = bucket.narrow(0, placed.offset, size)
            return torch.distributed.P2POp(torch.distributed.irecv, target, transfer.relay)
        assert placed.staged_at is not None, "only transfers with another sender are relayed"
        if not transfer.is_forwarded:
            self._put(bucket, placed, placed.staged_at)
        staged = bucket.narrow(0, placed.staged_at, size)
        return torch.distributed.P2POp(torch.distributed.isend, staged, transfer.sender)
