"""Dynamic sampling as arithmetic: how many groups to ask for, what to save, and what to say of too
few.

No engines, no clocks: what is asked for next depends on what earlier rounds returned alone, so a
resumed run asks for the same.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from megadapo.data.batch import Group
from megadapo.observe.config import SavedGroups
from megadapo.observe.saved_group import Fate

MAX_ASKED_PER_NEEDED = 4
"""A round asks for at most so many groups per missing one, so that one unlucky round does not
spend the whole step's bound on the next."""

MEMORY = 0.5
"""Weight that each round keeps in the yield when a newer one comes in."""


_TURNS: tuple[Fate, ...] = (
    *("trained", "all_wrong", "trained", "all_correct"),
    *("trained", "to_reserve", "trained", "dropped"),
)
"""Which fate the next group to be saved has, as long as there are any left of it."""


@dataclass(frozen=True, kw_only=True)
class SampledGroup:
    """A group and what became of it in a step."""

    group: Group
    fate: Fate
    from_reserve: bool
    """Whether an earlier step generated it."""


def choose_saved(groups: Sequence[SampledGroup], limit: SavedGroups) -> tuple[SampledGroup, ...]:
    """Return the groups of a step that are saved, in the order they were asked for.

    Args:
        groups: of the step, in any order.
        limit: how many; they are dealt out over the fates, and within a fate evenly over the order
            asked for, so that the same step always saves the same ones.
    """
    ordered = sorted(groups, key=lambda sampled: sampled.group.order)
    if limit == "all" or limit >= len(ordered):
        return tuple(ordered)
    by_fate: dict[Fate, list[SampledGroup]] = defaultdict(list)
    for sampled in ordered:
        by_fate[sampled.fate].append(sampled)
    shares: Counter[Fate] = Counter()
    turns = cycle(_TURNS)
    while shares.total() < limit:
        fate = next(turns)
        shares[fate] += shares[fate] < len(by_fate[fate])
    chosen = {
        members[place * len(members) // shares[fate]].group.order
        for fate, members in by_fate.items()
        for place in range(shares[fate])
    }
    return tuple(sampled for sampled in ordered if sampled.group.order in chosen)


class YieldEstimate:
    """Share of groups with a signal, over the latest rounds."""

    def __init__(self) -> None:
        self._asked = 0.0
        self._with_signal = 0.0

    @property
    def value(self) -> float:
        """In (0, 1]; 1 before the first round."""
        return (self._with_signal + 1.0) / (self._asked + 1.0)

    def update(self, num_asked: int, num_with_signal: int) -> None:
        """Take in one round."""
        self._asked = MEMORY * self._asked + num_asked
        self._with_signal = MEMORY * self._with_signal + num_with_signal

    def state_dict(self) -> dict[str, float]:
        return {"asked": self._asked, "with_signal": self._with_signal}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._asked = float(state["asked"])
        self._with_signal = float(state["with_signal"])


def round_size(
    num_missing: int, expected_yield: float, *, oversampling: float, num_allowed: int
) -> int:
    """Return how many groups to ask for so that `num_missing` of them should have one.

    Args:
        num_missing: groups the batch still lacks, at least 1.
        expected_yield: share of groups that should have one, in (0, 1].
        oversampling: margin above the expected need, at least 1.
        num_allowed: groups that may still be asked for in this step.
    """
    wanted = math.ceil(num_missing * oversampling / expected_yield)
    return min(wanted, MAX_ASKED_PER_NEEDED * num_missing, num_allowed)


def accuracy_histogram(groups: Iterable[Group]) -> Counter[int]:
    """Count groups by their number of correct responses."""
    return Counter(sum(group.correct) for group in groups)


def describe_shortfall(
    num_found: int, num_needed: int, histogram: Mapping[int, int], num_responses: int
) -> str:
    """Say that too few groups have a signal, with the accuracies that were seen and what to do."""
    num_asked = sum(histogram.values())
    num_wrong = histogram.get(0, 0)
    num_right = histogram.get(num_responses, 0)
    bars = "\n".join(
        f"  {correct:>3} of {num_responses} right: {count} groups"
        for correct, count in sorted(histogram.items())
    )
    advice = (
        "the problems are too hard for the model, or its answers miss the format the scorer reads"
        if num_wrong >= num_right
        else "the problems are too easy for the model: use harder ones"
    )
    return (
        f"only {num_found} of {num_needed} groups for the batch after asking for {num_asked}: "
        f"{num_wrong} were all wrong, {num_right} all right\n{bars}\n{advice}; or raise "
        "sampling.responses_per_prompt or sampling.max_asked_per_prompt"
    )
