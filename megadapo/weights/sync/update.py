"""One weight update as the driver runs it: version, content and rounds."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from megadapo.weights.config import WeightsConfig
from megadapo.weights.sync.delta.state import Delta, Encoded, combine
from megadapo.weights.sync.peers import UpdatePeers
from megadapo.weights.sync.plan import UpdatePlan

if TYPE_CHECKING:
    from ray import ObjectRef

Sums = list[list[list[int]]]
"""[round][trainer rank] -> checksums of the slices in the rank's bucket, if they are compared."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """The content of one update."""

    version: int
    num_bytes: int
    num_rounds: int
    compares_at_end: bool
    """Whether checksums are compared after the last round. A delta carries its own checksums, and
    engines compare them as it arrives."""
    density: float | None = None
    """Share of the elements that changed; None if unknown."""
    delta: Delta | None = None
    """Header of the changes; None if all weights are sent."""


SPAN = 80
"""Rounds that trainer ranks and engines do in one call, which `weights.deadline_s` limits. The 32B
recipes have up to 66; 80 buckets of the default size are 5 GiB of each rank."""
MAX_DELTA = 0.25
"""Share of a full update's bytes above which a delta is sent as a full update."""
FULL_EVERY = 50
"""Interval of full updates among delta updates."""


class UpdateVersions:
    """The versions of a connection's updates: which one every engine has, which were verified.

    A policy version is not enough: it can be published twice, and by two publishers.
    """

    def __init__(self, config: WeightsConfig, *, deltas: bool) -> None:
        self.deltas = deltas
        """Whether updates may send only the changes."""
        self._config = config
        self._num_unverified = 0
        """Updates since the last verified one, over any connection."""
        self.reset()

    def reset(self) -> None:
        """Start the versions of a new connection; random, so that no other one has them."""
        self._newest = secrets.randbits(40) << 20
        self._base: int | None = None
        self._is_first = True
        self._num_since_full = 0

    @property
    def base(self) -> int | None:
        """Version that a delta can be sent from; None if all weights must be sent."""
        is_due = self._num_since_full + 1 >= FULL_EVERY
        return self._base if self.deltas and not is_due else None

    def all_have_base(self, current: Mapping[int, Sequence[int | None]]) -> bool:
        """Return whether every rank of every engine has the base of a delta.

        `current`: version of each rank's weights, by engine.
        """
        return all(version == self.base for ranks in current.values() for version in ranks)

    def verifies(self, *, in_full: bool) -> bool:
        """Return whether the present update compares checksums."""
        mode = self._config.verify
        if mode in ("every", "off"):
            return mode == "every"
        is_due = isinstance(mode, int) and self._num_unverified + 1 >= mode
        return is_due or self._is_first or (self.deltas and in_full)

    def begin(self) -> int:
        """Allocate a version. No engine's base version is trusted until the update completes."""
        self._newest += 1
        self._base = None
        return self._newest

    def finish(self, version: int, *, in_full: bool) -> None:
        """Record that every engine has the version."""
        self._num_unverified = 0 if self.verifies(in_full=in_full) else self._num_unverified + 1
        self._base, self._is_first = version, False
        self._num_since_full = 0 if in_full else self._num_since_full + 1


def combine_if_small(
    plan: UpdatePlan, encoded: Sequence[Encoded | None], *, base: int
) -> tuple[Delta | None, float | None]:
    """Combine the sections of all trainer ranks, given by rank.

    Returns:
        The delta, or None if it exceeds MAX_DELTA of a full update's bytes; and the density, or
        None if a rank has stopped encoding.
    """
    complete = [piece for piece in encoded if piece is not None]
    if len(complete) < len(encoded):
        return None, None
    delta = combine(plan, complete, base)
    num_elements = sum(one.num_elements for one in complete)
    density = sum(one.num_changed for one in complete) / num_elements
    return (delta if sum(delta.sizes) <= MAX_DELTA * plan.num_bytes else None), density


def run_rounds(peers: UpdatePeers, update: Update, sums: Sums) -> None:
    """Move an update into the idle engines round by round, and compare checksums.

    Senders fill the bucket of the next round while engines read the present one. They wait for each
    other, not for the driver.

    Args:
        sums: Checksums of the first round, which is in a bucket; those of the others are appended.
    """
    num_rounds, delta = update.num_rounds, update.delta
    begin = {
        "version": update.version,
        "with_checksums": update.compares_at_end,
        "delta": None if delta is None else asdict(delta),
    }
    peers.call_engines("start_weight_update", doing="start")
    for first in range(0, num_rounds, SPAN):
        rounds = list(range(first, min(first + SPAN, num_rounds)))
        taking = _take(peers, {"rounds": rounds} | ({"begin": begin} if first == 0 else {}))
        if following := [number + 1 for number in rounds if number + 1 < num_rounds]:
            sums += fill(peers, update, following)
        peers.wait_engines(taking, _name(rounds, num_rounds))
    if update.compares_at_end:
        by_sender = [list(rounds) for rounds in zip(*sums, strict=True)]
        peers.wait_engines(_take(peers, {"checksums": by_sender}), "checksums", forgive=False)


def fill(peers: UpdatePeers, update: Update, rounds: Sequence[int]) -> Sums:
    """Fill the buckets of rounds on every trainer rank, and return their checksums."""
    refs = peers.submit_ranks("fill_rounds", rounds, with_checksums=update.compares_at_end)
    sums = peers.wait_ranks(refs, _name(rounds, update.num_rounds))
    return [list(by_rank) for by_rank in zip(*sums, strict=True)]


def _name(rounds: Sequence[int], num_rounds: int) -> str:
    if len(rounds) == 1:
        return f"bucket {rounds[0]} of {num_rounds}"
    return f"buckets {rounds[0]} to {rounds[-1]} of {num_rounds}"


def _take(peers: UpdatePeers, info: dict[str, object]) -> dict[int, ObjectRef[Any]]:
    return peers.submit_engines("update_weights", info)
