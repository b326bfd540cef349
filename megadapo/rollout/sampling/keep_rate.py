"""The expected number of mixed groups among open ones, and when to request another group.

No engines, no texts and no clock: only counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KEEP_RATE_DECAY = 0.5
"""Factor on the counts of earlier steps in a keep rate when a newer step is added."""
LATE_REQUEST_COST = 0.125
"""Extra time of a step if a missing group is requested late, as a share of a group's time.

A shortage is noticed half-way on average, so 0.5 is the upper bound. It is lower because the batch
often waits for a longer group anyway. `megadapo simulate` was used to choose it: with 0.25 one
regime wastes 7 % of the kept tokens, with 0.125 none wastes more than 5 %."""
MARGIN = 2.0
"""Standard deviations by which the number of mixed groups may exceed its expectation."""
SAFE_MARGIN = 6.0
"""The same where an excess would drop groups."""
SAFE_GROWTH = 1.25
"""Factor by which keep rates may exceed their estimates there, because the policy learns."""


class KeepRate:
    """The share of mixed groups, estimated from earlier steps and the current one."""

    def __init__(self) -> None:
        self._requested = 0.0
        self._mixed = 0.0
        self._requested_now = 0
        self._mixed_now = 0

    @property
    def value(self) -> float:
        """Mean of a Beta posterior with a uniform prior, in (0, 1)."""
        return (self._mixed + self._mixed_now + 1.0) / (self._total + 2.0)

    @property
    def variance(self) -> float:
        """Variance of the posterior."""
        return self.value * (1.0 - self.value) / (self._total + 3.0)

    def add(self, is_mixed: bool) -> None:
        """Count a group of the current step until `end_step` replaces these counts."""
        self._requested_now += 1
        self._mixed_now += is_mixed

    def end_step(self, num_requested: int, num_mixed: int) -> None:
        """Add the final counts of a step, which do not depend on the order of finishing."""
        self._requested_now = self._mixed_now = 0
        if num_requested:
            self._requested = KEEP_RATE_DECAY * self._requested + num_requested
            self._mixed = KEEP_RATE_DECAY * self._mixed + num_mixed

    def state_dict(self) -> dict[str, float]:
        return {"requested": self._requested, "mixed": self._mixed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._requested = float(state["requested"])
        self._mixed = float(state["mixed"])

    @property
    def _total(self) -> float:
        return self._requested + self._requested_now


@dataclass
class ExpectedMixed:
    """Mean and variance of the number of mixed groups among the open ones."""

    mean: float = 0.0
    variance: float = 0.0
    num_groups: int = 0

    @classmethod
    def of(cls, num_groups: Mapping[KeepRate, int]) -> ExpectedMixed:
        """Return the expectation for these numbers of groups with each keep rate."""
        expected = cls()
        for rate, number in num_groups.items():
            expected.add(rate, number)
        return expected

    @property
    def most(self) -> float:
        """Number of mixed groups that is practically never exceeded."""
        spread = math.sqrt(self.variance)
        return min(self.num_groups, SAFE_GROWTH * self.mean + SAFE_MARGIN * spread)

    def add(self, rate: KeepRate, num_groups: int) -> None:
        """Add groups with one keep rate; errors of different rates are independent."""
        p = rate.value
        self.num_groups += num_groups
        self.mean += num_groups * p
        self.variance += num_groups * p * (1.0 - p) + num_groups**2 * rate.variance


def should_oversample(
    num_missing: int, expected: ExpectedMixed, rate: KeepRate, *, num_at_once: int
) -> bool:
    """Return whether to request another group now, before it is known to be missing.

    Let p be the probability that the open groups are one short and this group is the missing one.
    Without the request the step then takes LATE_REQUEST_COST of a group's time longer. With it, the
    other groups always wait for one group's share of the engines' throughput. By Little's law a
    group's time is num_at_once such shares, so request it if p LATE_REQUEST_COST num_at_once > 1.

    Args:
        num_missing: mixed groups that the batch lacks.
        expected: mixed groups among the open ones.
        rate: keep rate of the next prompt.
        num_at_once: largest number of groups that were open at once in this step.
    """
    if expected.mean < num_missing:
        return True
    if num_missing <= 0:
        return False
    spread = math.sqrt(expected.variance)
    if spread == 0.0:
        return False
    gap = (num_missing - 0.5 - expected.mean) / spread
    density = math.exp(-0.5 * gap * gap) / math.sqrt(2.0 * math.pi) / spread
    return density * rate.value * LATE_REQUEST_COST * num_at_once > 1.0


def would_go_stale(num_usable: int, num_ready: int, expected: ExpectedMixed) -> bool:
    """Return whether another group could finish after the last batch that may train on it.

    Args:
        num_usable: groups that this and later steps can train on before they are too old, beside
            the groups those steps request themselves.
        num_ready: mixed groups that have finished.
        expected: mixed groups among the open ones.
    """
    return num_ready + expected.mean + MARGIN * math.sqrt(expected.variance) >= num_usable
