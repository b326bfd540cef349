"""Buckets sent from trainer ranks to engine ranks on other devices, over one process group.

NCCL between GPUs, Gloo between CPUs. The group is separate from the default groups of trainer and
engine; trainer ranks come first in it. Both sides issue the messages of a pair in plan order, so
messages need no tags.

A round travels in waves of at most one bucket per engine rank. All ranks process the waves in the
same order, so that no rank waits for a rank that waits for another wave.

Only the first engine of a node is sent a wave; each engine forwards it to the next, rank by rank.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from megadapo.cluster.this_node import node_address, use_interface_towards
from megadapo.weights.config import NCCL_TIMEOUT_S
from megadapo.weights.sync.transports.interface import NUM_BUCKETS, Message, Offer, Outbox

TIMEOUT = timedelta(seconds=NCCL_TIMEOUT_S)
"""Time limit of the group; `weights.deadline_s` ends earlier, and its error names the rank."""


Group = Any
"""A process group of torch, which does not type its methods."""


class PointToPointOutbox(Outbox):
    """Two buckets on this trainer rank's device."""

    def __init__(self, num_bytes: int, device: torch.device, *, rank: int, num_ranks: int) -> None:
        super().__init__(torch.empty(NUM_BUCKETS, num_bytes, dtype=torch.uint8, device=device))
        self._device, self._rank, self._num_ranks = device, rank, num_ranks
        self._sending: list[list[dist.Work]] = [[] for _ in range(NUM_BUCKETS)]
        self._store: dist.TCPStore | None = None
        self._group: Group = None

    def offer(self) -> Offer:
        """Open the store where all ranks meet, on rank 0; the other offers are empty."""
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

    def bucket(self, round_number: int) -> torch.Tensor:
        """Return the bytes to fill, once their previous content has been received."""
        half = round_number % NUM_BUCKETS
        for work in self._sending[half]:
            work.wait()
        self._sending[half] = []
        return self._memory[half]

    def post(self, round_number: int, messages: Sequence[Message]) -> None:
        """Start to send every message to its engine rank, wave after wave."""
        half = round_number % NUM_BUCKETS
        self._sending[half] = [
            work
            for wave in _waves(sorted(messages, key=attrgetter("wave")))
            for work in self._send(self._memory[half], wave)
        ]

    def _send(self, bucket: torch.Tensor, wave: Sequence[Message]) -> list[dist.Work]:
        sends = [
            partial(
                self._group.send,
                [bucket.narrow(0, message.offset, message.num_bytes)],
                message.target,
                0,
            )
            for message in wave
        ]
        return issue_together(self._group, self._device, sends)

    def close(self) -> None:
        super().close()
        self._sending = [[] for _ in range(NUM_BUCKETS)]
        self._group = self._store = None


class PointToPointInbox:
    """A receive buffer for one wave of this engine rank.

    Args:
        rank: Number of this engine rank among all ranks.
        previous: Engine rank that forwards messages to this one; None: trainer ranks send them.
        following: Engine rank that this one forwards messages to.
    """

    def __init__(
        self,
        offers: Sequence[Offer | None],
        num_bytes: int,
        device: torch.device,
        *,
        rank: int,
        num_ranks: int,
        previous: int | None,
        following: int | None,
    ) -> None:
        self._device, self._previous, self._following = device, previous, following
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._forwarding: list[dist.Work] = []
        self._store: dist.TCPStore | None
        self._group, self._store = join_group(offers, device, rank=rank, num_ranks=num_ranks)

    def wait(self, messages: Sequence[Message]) -> bool:
        """Return at once, as `receive` waits."""
        return True

    def receive(self, round_number: int, messages: Sequence[Message]) -> Iterator[torch.Tensor]:
        """Yield the bytes of each message; the buffer is reused from wave to wave."""
        for wave in _waves(messages):
            yield from self._receive(wave)

    def _receive(self, wave: Sequence[Message]) -> list[torch.Tensor]:
        """Wait for the messages of a wave, and start to forward them."""
        group, previous = self._group, self._previous
        for work in self._forwarding:
            work.wait()
        sizes = [placed.num_bytes for placed in wave]
        received = list(self._memory[: sum(sizes)].split(sizes))
        peers = [placed.sender if previous is None else previous for placed in wave]
        receives = [
            partial(group.recv, [content], peer, 0)
            for content, peer in zip(received, peers, strict=True)
        ]
        for work in issue_together(group, self._device, receives):
            work.wait()
        if self._following is not None:
            sends = [partial(group.send, [content], self._following, 0) for content in received]
            self._forwarding = issue_together(group, self._device, sends)
        return received

    def close(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._forwarding = []
        self._group = self._store = None


def _waves(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Split messages that are in order of their waves."""
    for _, wave in groupby(messages, key=attrgetter("wave")):
        yield list(wave)


def join_group(
    offers: Sequence[Offer | None],
    device: torch.device,
    *,
    rank: int,
    num_ranks: int,
    store: dist.TCPStore | None = None,
) -> tuple[Group, dist.TCPStore]:
    """Join the group at the store that trainer rank 0 offers; waits for all ranks."""
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
        group: Group = dist.ProcessGroupNCCL(prefixed, rank, num_ranks, options)
    else:
        group = dist.ProcessGroupGloo(prefixed, rank, num_ranks, TIMEOUT)
    # The first collective creates the communicator; a send must not wait for that.
    group.allreduce([torch.zeros(1, device=device)]).wait()
    return group, store


def issue_together(
    group: Group, device: torch.device, operations: Sequence[Callable[[], dist.Work]]
) -> list[dist.Work]:
    """Issue messages so that none waits for another; NCCL makes one operation of them."""
    if device.type != "cuda" or not operations:
        return [operation() for operation in operations]
    group._start_coalescing()
    for operation in operations:
        operation()
    return [group._end_coalescing()]
