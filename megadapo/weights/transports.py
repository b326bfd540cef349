"""What carries slices from a trainer rank to the engine ranks, behind one interface.

A trainer rank owns two buckets (round k uses bucket k % 2) and offers them once; engine ranks open
the offers once. After that a round needs no metadata at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megadapo.errors import InfraError

NUM_BUCKETS = 2


@dataclass(frozen=True, slots=True)
class Parcel:
    """A range of a trainer rank's bucket, and the engine rank it is for."""

    feeder: int
    target: int
    """Number of the engine rank among all ranks, the trainer's counted first."""
    offset: int
    num_bytes: int


class Outbox(Protocol):
    """A trainer rank's side."""

    def offer(self) -> dict:
        """What the others need to open the buckets; plain values only."""
        ...

    def connect(self, offers: Sequence[dict | None]) -> None:
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

    def fetch(self, round_number: int, parcels: Sequence[Parcel]) -> list[torch.Tensor]:
        """The bytes of each parcel, to be read before the next round."""
        ...

    def close(self) -> None:
        """Let go of the buckets."""
        ...


def open_outbox(
    transport: str, num_bytes: int, *, device: torch.device, rank: int, num_ranks: int
) -> Outbox:
    """Two buckets of `num_bytes` for trainer rank `rank`; `num_ranks` counts engine ranks too."""
    if transport == "shared_memory":
        from megadapo.weights.shared_memory import SharedMemoryOutbox

        return SharedMemoryOutbox(num_bytes)
    if transport == "cuda_ipc":
        from megadapo.weights.cuda_ipc import CudaIpcOutbox

        return CudaIpcOutbox(num_bytes, device)
    if transport == "nccl":
        from megadapo.weights.point_to_point import PointToPointOutbox

        return PointToPointOutbox(num_bytes, device, rank=rank, num_ranks=num_ranks)
    raise InfraError(f"weights.transport: unknown transport {transport!r}.")


def open_inbox(
    transport: str,
    offers: Sequence[dict | None],
    *,
    device: torch.device,
    rank: int,
    num_ranks: int,
) -> Inbox:
    """The trainer ranks' buckets, for an engine rank that is number `rank` of all `num_ranks`."""
    if transport == "shared_memory":
        from megadapo.weights.shared_memory import SharedMemoryInbox

        return SharedMemoryInbox(offers)
    if transport == "cuda_ipc":
        from megadapo.weights.cuda_ipc import CudaIpcInbox

        return CudaIpcInbox(offers)
    if transport == "nccl":
        from megadapo.weights.point_to_point import PointToPointInbox

        return PointToPointInbox(offers, device, rank=rank, num_ranks=num_ranks)
    raise InfraError(f"weights.transport: unknown transport {transport!r}.")
