"""What carries a bucket from a trainer rank to the engine ranks, behind one interface.

A trainer rank owns two buckets (round k uses bucket k % 2) and offers them once; engine ranks open
the offers once. After that a round needs no metadata at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from megadapo.errors import InfraError

NUM_BUCKETS = 2


class Outbox(Protocol):
    """A trainer rank's side."""

    def offer(self) -> dict:
        """What an engine rank needs to open the buckets; plain values only."""
        ...

    def opened(self) -> None:
        """Every receiver has opened the offer."""
        ...

    def bucket(self, round_number: int) -> torch.Tensor:
        """The bytes to fill for a round; whoever read it two rounds ago has finished."""
        ...

    def post(self, round_number: int) -> None:
        """The bucket is full."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


class Inbox(Protocol):
    """An engine rank's side."""

    def bucket(self, feeder: int, round_number: int) -> torch.Tensor:
        """The bytes of a trainer rank's bucket, to be read before the next round."""
        ...

    def close(self) -> None:
        """Let go of the buckets."""
        ...


def open_outbox(transport: str, num_bytes: int, device: torch.device) -> Outbox:
    """Two buckets of `num_bytes` for this trainer rank."""
    if transport == "shared_memory":
        from megadapo.weights.shared_memory import SharedMemoryOutbox

        return SharedMemoryOutbox(num_bytes)
    if transport == "cuda_ipc":
        from megadapo.weights.cuda_ipc import CudaIpcOutbox

        return CudaIpcOutbox(num_bytes, device)
    raise InfraError(f"weights.transport: unknown transport {transport!r}.")


def open_inbox(transport: str, offers: Sequence[dict | None], device: torch.device) -> Inbox:
    """The buckets of the trainer ranks whose offer is given."""
    if transport == "shared_memory":
        from megadapo.weights.shared_memory import SharedMemoryInbox

        return SharedMemoryInbox(offers)
    if transport == "cuda_ipc":
        from megadapo.weights.cuda_ipc import CudaIpcInbox

        return CudaIpcInbox(offers, device)
    raise InfraError(f"weights.transport: unknown transport {transport!r}.")
