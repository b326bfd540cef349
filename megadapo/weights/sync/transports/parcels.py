"""What both sides of a transport mean by a round's buckets and the ranges in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NUM_BUCKETS = 2
"""Buckets of a trainer rank; round k uses bucket k % 2."""

Offer = dict[str, Any]
"""What opens a trainer rank's buckets: plain values, which only the transport that made them
reads."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A range of a trainer rank's bucket, and the engine rank it is for."""

    feeder: int
    target: int
    """Number of the engine rank among all ranks, the trainer's counted first."""
    offset: int
    num_bytes: int
    wave: int = 0
    """Which part of the round it travels in, where it is sent and not read in place."""


@dataclass(frozen=True, slots=True)
class Seat:
    """An engine rank's place among all ranks, the trainer's counted first."""

    rank: int
    num_ranks: int
    giver: int | None = None
    """Engine rank of the same node that hands on what it gets; None: trainer ranks send it."""
    taker: int | None = None
    """Engine rank of the same node that this one hands it on to."""
