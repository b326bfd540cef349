"""Slices that trainer ranks hand to each other, for engines that cannot reach their owner."""

from __future__ import annotations

from megadapo.weights.sync.buckets import Placed, Schedule

Batches = tuple[list[Placed], list[Placed]]
"""A rank's messages of a round, in the two batches that it issues and waits for in turn: what is
on its way from the origin, and what is handed on inside the node when it is there."""


def relay_batches(schedule: Schedule, rank: int) -> dict[int, Batches]:
    """Round -> what a rank hands to another rank's bucket, or gets for its own.

    A rank without messages enters no batch. Both ranks of a message have it in the same batch, and
    all messages of a pair in the same order.
    """
    relayed: dict[int, Batches] = {}
    for rounds in schedule:
        for number, bucket in enumerate(rounds):
            for placed in bucket:
                ranks = (placed.transfer.passer, placed.transfer.feeder)
                if placed.staged_at is not None and rank in ranks:
                    batches = relayed.setdefault(number, ([], []))
                    batches[placed.transfer.is_forwarded].append(placed)
    return relayed
