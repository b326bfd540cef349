"""What the driver decides of each update: in full or what changed, from which version, whether
checksums are compared."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megadapo.weights.config import WeightsConfig
from megadapo.weights.sync.delta.state import Delta, Encoded, delta_of
from megadapo.weights.sync.plan import Plan, plan_bytes


@dataclass(frozen=True, kw_only=True)
class Sending:
    """What one update sends."""

    version: int
    num_bytes: int
    density: float | None = None
    """Share of the elements that changed; None where it was not looked at."""
    delta: Delta | None = None
    """None: all weights."""


class Versions:
    """Numbers the updates of a connection, and remembers which of them every engine has, and which
    were compared.

    A policy version is not enough: the same one can be published twice, and by two publishers.
    """

    def __init__(self, config: WeightsConfig, *, deltas: bool) -> None:
        self.deltas = deltas
        """Whether updates may send only what changed."""
        self._config = config
        self._num_unverified = 0
        """Updates since the last one whose checksums were compared, over any connection."""
        self.connected()

    def connected(self) -> None:
        """Nothing was sent over the connection; its numbers are those of no other one."""
        self._newest = secrets.randbits(40) << 20
        self._base: int | None = None
        self._is_first = True
        self._num_since_full = 0

    @property
    def base(self) -> int | None:
        """The version that changes can be sent from; None: everything has to be sent."""
        is_due = self._num_since_full + 1 >= self._config.full_every
        return self._base if self.deltas and not is_due else None

    def verifies(self, *, in_full: bool) -> bool:
        """Whether the update that ends next compares checksums, if it is sent that way."""
        mode = self._config.verify
        if mode in ("every", "off"):
            return mode == "every"
        is_due = isinstance(mode, int) and self._num_unverified + 1 >= mode
        return is_due or self._is_first or (self.deltas and in_full)

    def begin(self) -> int:
        """Number of a new update; until it has ended, nobody is known to have anything."""
        self._newest += 1
        self._base = None
        return self._newest

    def ended(self, sending: Sending) -> None:
        """Every engine that is updated at all has what was sent."""
        in_full = sending.delta is None
        self._num_unverified = 0 if self.verifies(in_full=in_full) else self._num_unverified + 1
        self._base, self._is_first = sending.version, False
        self._num_since_full = 0 if in_full else self._num_since_full + 1


def all_have(base: int, held: Mapping[int, Sequence[int | None]]) -> bool:
    """Whether all ranks of all engines have the weights that changes are to be sent from."""
    return all(version == base for ranks in held.values() for version in ranks)


def sending_of(
    plan: Plan, encoded: Sequence[Encoded | None], *, base: int, version: int, max_delta: float
) -> Sending:
    """Send what the trainer ranks, by rank, have encoded, unless it is too much of the model."""
    in_full = Sending(version=version, num_bytes=plan_bytes(plan))
    there = [one for one in encoded if one is not None]
    if len(there) < len(encoded):
        return in_full
    delta = delta_of(plan, there, base)
    num_elements = sum(one.num_elements for one in there)
    density = sum(one.num_changed for one in there) / num_elements
    num_bytes = sum(delta.sizes)
    if num_bytes > max_delta * in_full.num_bytes:
        return Sending(version=version, num_bytes=in_full.num_bytes, density=density)
    return Sending(version=version, num_bytes=num_bytes, density=density, delta=delta)
