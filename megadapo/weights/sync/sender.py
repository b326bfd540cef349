"""A trainer rank's side of a weight update: it fills the buckets that the plan gives to it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megadapo.weights.disk.load import match_params
from megadapo.weights.layout.layout import ModelLayout
from megadapo.weights.layout.shards import ShardPosition
from megadapo.weights.sync.buckets import (
    Placed,
    Schedule,
    checksum,
    largest_buckets,
    pack,
    parcel_of,
    slice_view,
)
from megadapo.weights.sync.parcels import Offer
from megadapo.weights.sync.plan import Plan, Transfer
from megadapo.weights.sync.transports import Outbox, open_outbox


@dataclass(frozen=True, kw_only=True)
class SenderInfo:
    """What the driver must know of a trainer rank to plan an update."""

    position: ShardPosition
    layout: ModelLayout
    node: str
    gpu: str | None
    """What its node calls the rank's GPU; None on a CPU."""


@dataclass(frozen=True)
class _Prepared:
    """What every update of one plan does on this rank."""

    plan: Plan
    dtype: torch.dtype
    own: list[list[Placed]]
    """What this rank's bucket of each round holds."""
    relayed: dict[int, list[Placed]]
    """Round -> what this rank hands to another rank's bucket, or gets for its own."""
    outbox: Outbox


class WeightSender:
    """Copies slices of this rank's parameters into buckets.

    Args:
        params: Megatron-named parameters of this rank, with global layer numbers; they are read
            where they are, at every update.
        layout: Layout of the model.
        position: What of the model this rank holds.
        rank: This rank's number among the trainer's ranks.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        layout: ModelLayout,
        position: ShardPosition,
        rank: int,
    ) -> None:
        pairs = match_params(params, layout, position)
        self._params = {shard.name: param for shard, param in pairs}
        self._position, self._layout, self._rank = position, layout, rank
        self._device = pairs[0][1].device
        self._prepared: _Prepared | None = None

    def describe(self) -> SenderInfo:
        """Where this rank stands and runs."""
        return SenderInfo(
            position=self._position,
            layout=self._layout,
            node=socket.gethostname(),
            gpu=_gpu_name(self._device) if self._device.type == "cuda" else None,
        )

    def prepare(
        self, plan: Plan, *, bucket_bytes: int, dtype: torch.dtype, transport: str
    ) -> Offer:
        """Take the plan, allocate two buckets and offer them."""
        self.close()
        schedule = pack(plan, bucket_bytes)
        outbox = open_outbox(
            transport,
            largest_buckets(plan, schedule)[self._rank],
            device=self._device,
            rank=self._rank,
            num_ranks=plan.num_ranks,
        )
        relayed = _relayed(schedule, self._rank)
        self._prepared = _Prepared(plan, dtype, schedule[self._rank], relayed, outbox)
        return outbox.offer()

    def connect(self, offers: Sequence[Offer | None]) -> None:
        """Meet the engine ranks, who are opening the offers at the same time."""
        self._ready.outbox.connect(offers)

    def opened(self) -> None:
        """Every receiver has opened the offer."""
        if self._prepared is not None:
            self._prepared.outbox.opened()

    @torch.no_grad()
    def fill(self, round_number: int, *, with_checksums: bool = False) -> list[int]:
        """Fill this rank's bucket of a round.

        Collective over the trainer where the plan relays slices between its nodes.

        Returns:
            The checksum of every slice in the bucket, in order, if asked for.
        """
        ready = self._ready
        self._relay(ready, round_number)
        if round_number >= len(ready.own):
            return []
        own = ready.own[round_number]
        bucket = ready.outbox.bucket(round_number)
        sums = []
        for placed in own:
            if placed.transfer.origin == self._rank:
                self._fill_one(ready, bucket, placed.transfer, placed.offset)
            if with_checksums:
                sums += _checksums(ready, bucket, placed)
        ready.outbox.post(round_number, [parcel_of(ready.plan, placed) for placed in own])
        return sums

    @torch.no_grad()
    def fingerprint(self) -> list[int]:
        """Return the checksum of each parameter of this rank."""
        return [checksum(param) for _, param in sorted(self._params.items())]

    def close(self) -> None:
        """Give the buckets back."""
        if self._prepared is not None:
            self._prepared.outbox.close()
        self._prepared = None

    @property
    def _ready(self) -> _Prepared:
        assert self._prepared is not None, "prepare first"
        return self._prepared

    def _fill_one(
        self, ready: _Prepared, bucket: torch.Tensor, transfer: Transfer, start: int
    ) -> None:
        for offset, copy in ready.plan.slices(transfer, start):
            param = self._params[copy.source_name]
            piece = param.narrow(copy.axis, copy.source_offset, copy.size)
            slice_view(bucket, offset, copy, ready.dtype).copy_(piece)

    def _relay(self, ready: _Prepared, round_number: int) -> None:
        """Hand slices to the ranks that feed engines on other nodes, over the trainer's group.

        Both sides have a place for them in this round's bucket.
        """
        relayed = ready.relayed.get(round_number)
        if not relayed:
            return
        bucket = ready.outbox.bucket(round_number)
        operations = [self._relay_one(ready, bucket, placed) for placed in relayed]
        for work in torch.distributed.batch_isend_irecv(operations):
            work.wait()

    def _relay_one(
        self, ready: _Prepared, bucket: torch.Tensor, placed: Placed
    ) -> torch.distributed.P2POp:
        transfer, size = placed.transfer, ready.plan.bundle(placed.transfer).num_bytes
        if transfer.feeder == self._rank:
            place = bucket.narrow(0, placed.offset, size)
            return torch.distributed.P2POp(torch.distributed.irecv, place, transfer.origin)
        assert placed.staged_at is not None, "only what has another feeder is relayed"
        self._fill_one(ready, bucket, transfer, placed.staged_at)
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
    ) -> None:
        """Nothing is held yet; arguments as for `WeightSender`."""
        super().__init__(params, layout, position, rank)
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
            self._params[name].copy_(param)


def _checksums(ready: _Prepared, bucket: torch.Tensor, placed: Placed) -> list[int]:
    return [
        checksum(slice_view(bucket, offset, copy, ready.dtype))
        for offset, copy in ready.plan.slices(placed.transfer, placed.offset)
    ]


def _relayed(schedule: Schedule, rank: int) -> dict[int, list[Placed]]:
    """Round -> what this rank hands to another rank's bucket, or gets for its own."""
    relayed: dict[int, list[Placed]] = {}
    for rounds in schedule:
        for number, bucket in enumerate(rounds):
            for placed in bucket:
                ranks = (placed.transfer.origin, placed.transfer.feeder)
                if placed.staged_at is not None and rank in ranks:
                    relayed.setdefault(number, []).append(placed)
    return relayed


def _gpu_name(device: torch.device) -> str:
    """The number or UUID by which the node knows a device, whose number here may be another."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    index = device.index or 0
    return visible.split(",")[index] if visible else str(index)
