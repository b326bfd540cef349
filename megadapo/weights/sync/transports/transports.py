"""What carries slices from a trainer rank to the engine ranks, behind one interface.

A trainer rank owns two buckets (round k uses bucket k % 2) and offers them once; engine ranks open
the offers once. After that a round needs no metadata at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from typing import Protocol

import torch

from megadapo.errors import InfraError
from megadapo.weights.sync.transports.cuda_ipc import CudaIpcInbox, CudaIpcOutbox
from megadapo.weights.sync.transports.folder import FolderInbox, FolderOutbox
from megadapo.weights.sync.transports.parcels import Offer, Parcel, Seat
from megadapo.weights.sync.transports.point_to_point import PointToPointInbox, PointToPointOutbox
from megadapo.weights.sync.transports.shared_memory import SharedMemoryInbox, SharedMemoryOutbox


class Outbox(Protocol):
    """A trainer rank's side."""

    def offer(self) -> Offer:
        """What the others need to open the buckets; plain values only."""
        ...

    def connect(self, offers: Sequence[Offer | None]) -> None:
        """Meet the receivers, who are opening the offers at the same time."""
        ...

    def opened(self) -> None:
        """Every receiver has opened the offer."""
        ...

    def bucket(self, round_number: int) -> torch.Tensor:
        """The bytes to fill for a round; whoever read it two rounds ago has finished."""
        ...

    def post(self, round_number: int, parcels: Sequence[Parcel]) -> None:
        """The bucket is full."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


class Inbox(Protocol):
    """An engine rank's side."""

    def fetch(self, round_number: int, parcels: Sequence[Parcel]) -> Iterable[torch.Tensor]:
        """The bytes of each parcel, in order of their waves; each is to be read before the next
        one is asked for."""
        ...

    def close(self) -> None:
        """Let go of the buckets."""
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
    """Buckets of `num_bytes` for trainer rank `rank`; `num_ranks` counts engine ranks too.

    `folder`: where files go, if they do.
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
    feeders: Set[int],
    num_bytes: int,
    device: torch.device,
    seat: Seat,
) -> Inbox:
    """The trainer ranks' buckets, for the engine rank at `seat`.

    Args:
        offers: Of every trainer rank.
        feeders: The trainer ranks that this one reads from. What the others offer can lie on
            another node, or on a GPU that this process does not see.
        num_bytes: Largest wave of the engine rank: the memory to receive in, where the buckets
            cannot be read in place.
    """
    read = [offer if number in feeders else None for number, offer in enumerate(offers)]
    if transport == "shared_memory":
        return SharedMemoryInbox(read)
    if transport == "cuda_ipc":
        return CudaIpcInbox(read, device)
    if transport == "nccl":
        return PointToPointInbox(offers, num_bytes, device, seat)
    if transport == "folder":
        return FolderInbox(offers, device)
    raise InfraError(f"weights.transport: unknown transport {transport!r}.")
