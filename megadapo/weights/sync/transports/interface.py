"""The interface of all transports, which carry buckets from trainer ranks to engine ranks.

A trainer rank owns two buckets (round k uses bucket k % 2) and offers them once; engine ranks open
the offers once. After that a round needs no metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

NUM_BUCKETS = 2
"""Buckets of a trainer rank; round k uses bucket k % 2."""

Transport = Literal["shared_memory", "cuda_ipc", "nccl", "gloo"]
"""Transport of the buckets. "nccl" is Gloo if they are in main memory, where "gloo" puts them."""

Offer = dict[str, Any]
"""Plain values that open a trainer rank's buckets; only the transport that made them reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A range of a trainer rank's bucket, and the engine rank it is for."""

    sender: int
    target: int
    """Number of the engine rank among all ranks, the trainer's counted first."""
    offset: int
    num_bytes: int
    wave: int = 0
    """Part of the round that it travels in, if it is sent and not read in place."""


class Outbox:
    """The buckets of a trainer rank, [number of buckets, n] bytes.

    A transport overrides the calls that it needs; the others do nothing.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory

    def offer(self) -> Offer:
        """Return the plain values that receivers need to open the buckets."""
        raise NotImplementedError

    def connect(self, offers: Sequence[Offer | None]) -> None:
        """Connect to the receivers, which open the offers at the same time."""

    def opened(self) -> None:
        """Note that every receiver has opened the offer."""

    def bucket(self, round_number: int) -> torch.Tensor:
        """Return the bytes to fill for a round; all readers of two rounds ago have finished."""
        return self._memory[round_number % len(self._memory)]

    def post(self, round_number: int, messages: Sequence[Message]) -> None:
        """Make a full bucket available to the receivers."""

    def close(self) -> None:
        """Free the memory."""
        self._memory = torch.empty(0, dtype=torch.uint8)


class Inbox(Protocol):
    """An engine rank's access to the buckets."""

    def wait(self, messages: Sequence[Message]) -> bool:
        """Wait until these messages can be read; False if a trainer rank has ended."""

    def receive(self, round_number: int, messages: Sequence[Message]) -> Iterable[torch.Tensor]:
        """Yield the bytes of each message, in order of waves; read each before the next."""

    def close(self) -> None:
        """Release the buckets."""
