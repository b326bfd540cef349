"""Which groups of a step are saved, and what is said of a step that found too few."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from megadapo.algorithm.mini_batches import spread_stale
from megadapo.data.batch import Group
from megadapo.observe.config import SavedGroups
from megadapo.observe.rollouts.saved_group import Disposition

_TURNS: tuple[Disposition, ...] = (
    *("trained", "all_wrong", "trained", "all_correct"),
    *("trained", "to_reserve", "trained", "dropped", "out_of_band"),
)
"""Which fate the next group to be saved has, as long as there are any left of it."""


@dataclass(frozen=True, kw_only=True)
class SampledGroup:
    """A group and what became of it in a step."""

    group: Group
    fate: Disposition
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
    by_fate: dict[Disposition, list[SampledGroup]] = defaultdict(list)
    for sampled in ordered:
        by_fate[sampled.fate].append(sampled)
    shares: Counter[Disposition] = Counter()
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


def in_training_order(
    groups: Sequence[Group], policy_version: int, groups_per_mini_batch: int
) -> tuple[Group, ...]:
    """Return a step's groups in asking order, with those of earlier weights spread over it.

    Args:
        policy_version: of the weights that are trained.
    """
    ordered = sorted(groups, key=lambda group: group.order)
    is_stale = [group.oldest_version < policy_version for group in ordered]
    return tuple(ordered[i] for i in spread_stale(is_stale, groups_per_mini_batch))


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
