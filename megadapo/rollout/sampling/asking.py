"""Whether to ask for one group more: from the yield, its uncertainty, and the price of being late.

No engines and no clocks: what decides are numbers of groups alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MEMORY = 0.5
"""Weight that each step keeps in an estimate when a newer one comes in."""
PRICE_OF_LATENESS = 0.125
"""How much longer a step takes if a group it lacks is asked for late, as a share of a group's time.
At most half of it, as a shortage is noticed half-way on average; less, as the batch often waits for
a longer group anyway. How much less was tried out in `megadapo simulate`: at a quarter one of its
regimes generates 7 % of kept tokens for nothing, at an eighth none more than 5 %."""
MARGIN = 2.0
"""Standard deviations by which more groups than expected may come back with a signal."""


class KeepRate:
    """Share of groups with a signal: what earlier steps returned, and this one so far."""

    def __init__(self) -> None:
        self._asked = 0.0
        self._with_signal = 0.0
        self._asked_now = 0
        self._with_signal_now = 0

    @property
    def value(self) -> float:
        """Mean of the yield, in (0, 1): of a Beta distribution that starts flat."""
        return (self._with_signal + self._with_signal_now + 1.0) / (self._total + 2.0)

    @property
    def variance(self) -> float:
        """Of the yield around `value`."""
        return self.value * (1.0 - self.value) / (self._total + 3.0)

    def see(self, with_signal: bool) -> None:
        """Take in a group of the present step, which `end_step` may count differently."""
        self._asked_now += 1
        self._with_signal_now += with_signal

    def end_step(self, num_asked: int, num_with_signal: int) -> None:
        """Take in the step: what counts from now on, whoever finished first."""
        self._asked_now = self._with_signal_now = 0
        if num_asked:
            self._asked = MEMORY * self._asked + num_asked
            self._with_signal = MEMORY * self._with_signal + num_with_signal

    def state_dict(self) -> dict[str, float]:
        return {"asked": self._asked, "with_signal": self._with_signal}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._asked = float(state["asked"])
        self._with_signal = float(state["with_signal"])

    @property
    def _total(self) -> float:
        return self._asked + self._asked_now


@dataclass
class ExpectedMixed:
    """How many of the groups that are out will have a signal: mean and variance of their number."""

    mean: float = 0.0
    variance: float = 0.0

    def add(self, estimate: KeepRate, num_groups: int) -> None:
        """All groups of one yield; different ones err independently of each other."""
        p = estimate.value
        self.mean += num_groups * p
        self.variance += num_groups * p * (1.0 - p) + num_groups**2 * estimate.variance


def should_oversample(
    num_missing: int, chances: ExpectedMixed, estimate: KeepRate, *, num_at_once: int
) -> bool:
    """Whether a group more should be asked for now, or only once it is known to be missing.

    It is the one that fills the batch with the chance `density * yield`; then asking for it late
    would cost PRICE_OF_LATENESS times a group's time. It always costs the others one group's share
    of the engines' throughput. By Little's law a group's time holds as many such shares as groups
    run at once, whatever the engines' speed.

    Args:
        num_missing: groups with a signal that the batch lacks.
        chances: of the groups that are out.
        estimate: yield of the group in question.
        num_at_once: most groups that were out at the same time in this step.
    """
    if chances.mean < num_missing:
        return True
    if num_missing <= 0:
        return False
    spread = math.sqrt(chances.variance)
    if spread == 0.0:
        return False
    gap = (num_missing - 0.5 - chances.mean) / spread
    density = math.exp(-0.5 * gap * gap) / math.sqrt(2.0 * math.pi) / spread
    return density * estimate.value * PRICE_OF_LATENESS * num_at_once > 1.0


def would_go_stale(num_usable: int, num_ready: int, chances: ExpectedMixed) -> bool:
    """Whether a group more could come back when there is no batch left that may train on it.

    Args:
        num_usable: groups that this step and those after it, as far as groups may wait, can train
            on beside what those steps ask for themselves.
        num_ready: groups with a signal that are there.
        chances: of the groups that are out.
    """
    return num_ready + chances.mean + MARGIN * math.sqrt(chances.variance) >= num_usable
