"""Buckets sent from trainer ranks to engine ranks on other devices, over one process group.

NCCL between GPUs, Gloo between CPUs. The group is beside the default ones of trainer and engine:
trainer ranks come first, engine ranks after them. Both sides issue the messages of a pair in plan
order, so a message needs no tag of its own.

A round travels in waves, of which an engine rank receives at most a bucket each. All ranks go
through the waves in the same order, so that none waits for a rank that waits for another wave.

Of the engines of a node the first is sent a wave; each hands it on to the next, rank by rank.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import groupby
from operator import attrgetter
from typing import Protocol, cast

import torch
import torch.distributed as dist

from megadapo.cluster.this_node import node_address, use_interface_towards
from megadapo.weights.config import NCCL_TIMEOUT_S
from megadapo.weights.sync.transports.parcels import NUM_BUCKETS, Offer, Parcel, Seat

TIMEOUT = timedelta(seconds=NCCL_TIMEOUT_S)
"""As long as any deadline of a weight update, which is what names a stuck rank."""


class Messenger(Protocol):
    """What is used of torch's process groups of one backend, whose types torch leaves out."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work: ...

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work: ...

    def allreduce(self, tensors: list[torch.Tensor]) -> dist.Work: ...

    def _start_coalescing(self) -> None: ...

    def _end_coalescing(self) -> dist.Work: ...


class PointToPointOutbox:
    """Two buckets on this trainer rank's device."""

    def __init__(self, num_bytes: int, device: torch.device, *, rank: int, num_ranks: int) -> None:
        self._memory = torch.empty(NUM_BUCKETS, num_bytes, dtype=torch.uint8, device=device)
        self._device, self._rank, self._num_ranks = device, rank, num_ranks
        self._sending: list[list[dist.Work]] = [[] for _ in range(NUM_BUCKETS)]
        self._store: dist.TCPStore | None = None
        self._group: Messenger | None = None

    def offer(self) -> Offer:
        """Rank 0 opens the meeting point; the others have nothing to add."""
        if self._rank != 0:
            return {}
        address = node_address()
        # torch's own listener would take calls on every interface
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return {"address": address, "port": port}

    def connect(self, offers: Sequence[Offer | None]) -> None:
        """Join the group of all trainer and engine ranks."""
        self._group, self._store = join_group(
            offers, self._device, rank=self._rank, num_ranks=self._num_ranks, store=self._store
        )

    def opened(self) -> None:
        """Nothing was opened by name."""

    def bucket(self, round_number: int) -> torch.Tensor:
        """The bytes to fill, once what they held before has been received."""
        half = round_number % NUM_BUCKETS
        for work in self._sending[half]:
            work.wait()
        self._sending[half] = []
        return self._memory[half]

    def post(self, round_number: int, parcels: Sequence[Parcel]) -> None:
        """Send every parcel to its engine rank, wave after wave, without waiting for it."""
        half = round_number % NUM_BUCKETS
        self._sending[half] = [
            work
            for wave in waves(sorted(parcels, key=attrgetter("wave")))
            for work in self._send(self._memory[half], wave)
        ]

    def _send(self, bucket: torch.Tensor, wave: Sequence[Parcel]) -> list[dist.Work]:
        group = self._group
        assert group is not None, "connect first"
        messages = [bucket.narrow(0, one.offset, one.num_bytes) for one in wave]
        sends = [
            (lambda message=message, peer=one.target: group.send([message], peer, 0))
            for message, one in zip(messages, wave, strict=True)
        ]
        return issue_together(group, self._device, sends)

    def close(self) -> None:
        """Leave the group and give the memory back."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._sending = [[] for _ in range(NUM_BUCKETS)]
        self._group = self._store = None


class PointToPointInbox:
    """Receives what is sent to this engine rank, into memory of one wave."""

    def __init__(
        self, offers: Sequence[Offer | None], num_bytes: int, device: torch.device, seat: Seat
    ) -> None:
        self._device, self._seat = device, seat
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._handing_on: list[dist.Work] = []
        self._group: Messenger | None
        self._store: dist.TCPStore | None
        self._group, self._store = join_group(
            offers, device, rank=seat.rank, num_ranks=seat.num_ranks
        )

    def fetch(self, round_number: int, parcels: Sequence[Parcel]) -> Iterator[torch.Tensor]:
        """The parcels of a round, one wave after the other has been read."""
        for wave in waves(parcels):
            yield from self._receive(wave)

    def _receive(self, wave: Sequence[Parcel]) -> list[torch.Tensor]:
        """Wait for the parcels of a wave, and begin to hand them on."""
        group, giver, taker = self._group, self._seat.giver, self._seat.taker
        assert group is not None, "closed"
        for work in self._handing_on:
            work.wait()
        sizes = [one.num_bytes for one in wave]
        received = list(self._memory[: sum(sizes)].split(sizes))
        givers = [one.feeder if giver is None else giver for one in wave]
        receives = [
            (lambda message=message, peer=peer: group.recv([message], peer, 0))
            for message, peer in zip(received, givers, strict=True)
        ]
        for work in issue_together(group, self._device, receives):
            work.wait()
        if taker is not None:
            sends = [(lambda message=one: group.send([message], taker, 0)) for one in received]
            self._handing_on = issue_together(group, self._device, sends)
        return received

    def close(self) -> None:
        """Leave the group and give the memory back."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._handing_on = []
        self._group = self._store = None


def waves(parcels: Sequence[Parcel]) -> Iterator[list[Parcel]]:
    """Parcels that are in order of their waves, wave by wave."""
    for _, wave in groupby(parcels, key=attrgetter("wave")):
        yield list(wave)


def join_group(
    offers: Sequence[Offer | None],
    device: torch.device,
    *,
    rank: int,
    num_ranks: int,
    store: dist.TCPStore | None = None,
) -> tuple[Messenger, dist.TCPStore]:
    """Meet all ranks where the first trainer rank offered; returns when everyone is there."""
    meeting = offers[0]
    assert meeting is not None, "trainer rank 0 always makes an offer"
    use_interface_towards(meeting["address"])
    if store is None:
        store = dist.TCPStore(meeting["address"], meeting["port"], is_master=False, timeout=TIMEOUT)
    prefixed = dist.PrefixStore("megadapo-weights", store)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        group = cast(Messenger, dist.ProcessGroupNCCL(prefixed, rank, num_ranks, options))
    else:
        group = cast(Messenger, dist.ProcessGroupGloo(prefixed, rank, num_ranks, TIMEOUT))
    # The communicator comes into being with its first collective; a send must not wait for it.
    group.allreduce([torch.zeros(1, device=device)]).wait()
    return group, store


def issue_together(
    group: Messenger, device: torch.device, operations: Sequence[Callable[[], dist.Work]]
) -> list[dist.Work]:
    """Issue messages so that none waits for another; NCCL makes one operation of them."""
    if device.type != "cuda" or not operations:
        return [operation() for operation in operations]
    group._start_coalescing()
    for operation in operations:
        operation()
    return [group._end_coalescing()]
