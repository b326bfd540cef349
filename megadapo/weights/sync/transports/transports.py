"""The interface of all transports, which carry buckets from trainer ranks to engine ranks.

A trainer rank owns two buckets (round k uses bucket k % 2) and offers them once; engine ranks open
the offers once. After that a round needs no metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from typing import Protocol

import torch

from megadapo.errors import InfraError
from megadapo.weights.sync.buckets import Message, Offer
from megadapo.weights.sync.plan import ChainPosition
from megadapo.weights.sync.transports.folder import FolderInbox, FolderOutbox
from megadapo.weights.sync.transports.in_place import (
    CudaIpcInbox,
    CudaIpcOutbox,
    SharedMemoryInbox,
    SharedMemoryOutbox,
)
from megadapo.weights.sync.transports.point_to_point import PointToPointInbox, PointToPointOutbox


class Outbox(Protocol):
    """The buckets of a trainer rank."""

    def offer(self) -> Offer:
        """Return the plain values that receivers need to open the buckets."""
        ...

    def connect(self, offers: Sequence[Offer | None]) -> None:
        """Connect to the receivers, which open the offers at the same time."""
        ...

    def opened(self) -> None:
        """Note that every receiver has opened the offer."""
        ...

    def bucket(self, round_number: int) -> torch.Tensor:
        """Return the bytes to fill for a round; all readers of two rounds ago have finished."""
        ...

    def post(self, round_number: int, messages: Sequence[Message]) -> None:
        """Make a full bucket available to the receivers."""
        ...

    def close(self) -> None:
        """Free the memory."""
        ...


class Inbox(Protocol):
    """An engine rank's access to the buckets."""

    def receive(self, round_number: int, messages: Sequence[Message]) -> Iterable[torch.Tensor]:
        """Yield the bytes of each message, in order of waves; read each before the next."""
        ...

    def close(self) -> None:
        """Release the buckets."""
        ...


def open_outbox(
    transport: str,
    num_bytes: int,
    *,
    device: torch.device,
    rank: int,
    num_ranks: int,
    folder: Path | None = None,
) -> Outbox:
    """Open the buckets of a trainer rank.

    Args:
        transport: The resolved `weights.transport`.
        num_bytes: Size of a bucket.
        num_ranks: Number of trainer and engine ranks together.
        folder: Folder of the update files, for the transport "folder".
    """
    if transport == "shared_memory":
        return SharedMemoryOutbox(num_bytes)
    if transport == "cuda_ipc":
        return CudaIpcOutbox(num_bytes, device)
    if transport == "nccl":
        return PointToPointOutbox(num_bytes, device, rank=rank, num_ranks=num_ranks)
    if transport == "folder" and folder is not None:
        return FolderOutbox(folder, num_bytes, device, rank=rank)
    raise InfraError(f"weights.transport: unknown transport {transport!r}.")


def open_inbox(
    transport: str,
    offers: Sequence[Offer | None],
    *,
    senders: Set[int],
    num_bytes: int,
    device: torch.device,
    position: ChainPosition,
) -> Inbox:
    """Open the trainer ranks' buckets for one engine rank.

    Args:
        offers: Offer of every trainer rank.
        senders: Trainer ranks that this one reads from. The others may be on another node, or on a
            GPU that this process does not see.
        num_bytes: Largest wave of the engine rank: the size of its receive buffer, if it cannot
            read the buckets in place.
        position: Number of the engine rank, and the engines it forwards from and to.
    """
    readable = [offer if number in senders else None for number, offer in enumerate(offers)]
    if transport == "shared_memory":
        return SharedMemoryInbox(readable)
    if transport == "cuda_ipc":
        return CudaIpcInbox(readable, device)
    if transport == "nccl":
        return PointToPointInbox(offers, num_bytes, device, position)
    if transport == "folder":
        return FolderInbox(offers, device)
    raise InfraError(f"weights.transport: unknown transport {transport!r}.")
