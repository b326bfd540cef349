"""The state of one sampling step: open, kept and rejected groups, and their statistics."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from megadapo.data.group import Group, RewardParts
from megadapo.observe.config import SavedGroups
from megadapo.observe.rollouts.saved_group import Disposition
from megadapo.rollout.engine.activity import EngineActivity
from megadapo.rollout.sampling.plans import Plan
from megadapo.rollout.sampling.sampled_batch import SampledBatch, SampledGroup
from megadapo.rollout.sampling.scoring import ScoringPool
from megadapo.rollout.types import OpenGroup

_TURNS: tuple[Disposition, ...] = (
    *("trained", "all_wrong", "trained", "all_correct"),
    *("trained", "to_reserve", "trained", "dropped", "out_of_band"),
)
"""The order in which dispositions get a place among the saved groups."""


@dataclass(frozen=True, kw_only=True)
class GroupStats:
    """The statistics of a finished group, without its tokens and texts."""

    prompt_index: int
    prompt_id: str
    num_correct: int
    num_responses: int
    reward_sum: float
    lengths: tuple[int, ...]
    num_truncated: int
    is_mixed: bool
    seconds: float
    num_excluded: int = 0
    """Number of responses that a reward function failed on, left out of the group."""
    parts: RewardParts = ()
    """Reward parts of all responses."""
    num_generated: int
    """Number of sampled tokens; shared tokens count once."""
    num_output_tokens: int = 0
    """Number of tokens of tool output."""
    num_calls: int = 0
    num_branches: int = 0
    entropy_rises: tuple[float, ...] = ()
    """Normalised entropy after each tool call minus the start's; NaN if not measured."""

    @classmethod
    def from_group(cls, group: Group, *, is_mixed: bool) -> GroupStats:
        responses = group.responses
        return cls(
            prompt_index=group.prompt_index,
            prompt_id=group.prompt.id,
            num_correct=sum(group.correct),
            num_responses=len(responses),
            num_excluded=len(group.failures),
            reward_sum=float(sum(group.rewards)),
            parts=group.parts,
            lengths=group.lengths,
            num_truncated=sum(group.truncated),
            is_mixed=is_mixed,
            seconds=group.seconds,
            num_generated=group.num_generated,
            num_output_tokens=sum(group.lengths) - sum(group.num_sampled),
            num_calls=sum(len(one.calls) for one in responses),
            num_branches=sum(one.branch is not None for one in responses),
            entropy_rises=tuple(
                call.entropy - one.entropy for one in responses for call in one.calls
            ),
        )


def accuracy_histogram(stats: Iterable[GroupStats]) -> Counter[int]:
    """Count groups by their number of correct responses."""
    return Counter(group.num_correct for group in stats)


class RejectedGroups:
    """The rejected groups that may be saved; the texts of all others are forgotten."""

    def __init__(self, limit: SavedGroups) -> None:
        """`limit`: number of groups that a step saves."""
        self._limit = limit
        self._groups: dict[Disposition, list[Group]] = defaultdict(list)

    def add(self, group: Group) -> None:
        """Keep the group if it is among the first of its disposition by prompt index."""
        disposition: Disposition = "all_correct"
        if not all(group.correct):
            disposition = "out_of_band" if any(group.correct) else "all_wrong"
        groups = self._groups[disposition]
        groups.append(group)
        if self._limit != "all" and len(groups) > self._limit:
            groups.remove(max(groups, key=lambda one: one.prompt_index))

    def counted(self, stats: Sequence[GroupStats]) -> list[SampledGroup]:
        """Return the kept groups that are in a step's statistics."""
        indices = {one.prompt_index for one in stats}
        return [
            SampledGroup(group=group, disposition=disposition, from_reserve=False)
            for disposition, groups in self._groups.items()
            for group in groups
            if group.prompt_index in indices
        ]


@dataclass
class StepCounters:
    """The statistics of one step so far."""

    stats: list[GroupStats] = field(default_factory=list)
    unscored: list[Group] = field(default_factory=list)
    """Groups with too few scored responses; other prompts take their places."""
    to_reserve: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)
    surplus: list[Group] = field(default_factory=list)
    num_surplus_unseen: int = 0
    num_stopped: int = 0
    num_carried: int = 0
    num_resting: int = 0
    num_from_journal: int = 0
    num_tokens_stopped: int = 0
    reward_seconds: float = 0.0
    engines: Sequence[EngineActivity] = ()
    rejected: RejectedGroups = field(default_factory=lambda: RejectedGroups(0))

    @property
    def num_excluded(self) -> int:
        """Number of responses that reward functions failed on, left out of all other counts."""
        of_unscored = sum(len(group.failures) for group in self.unscored)
        return of_unscored + sum(group.num_excluded for group in self.stats)

    def forget_after(self, last: int) -> None:
        """Count groups behind the batch's last prompt index as surplus, not in the statistics.

        The next step requests them again. Which of them finished depends on the engines' speed, so
        they must not influence anything.
        """
        unseen = [group for group in self.stats if group.prompt_index > last]
        self.stats = [group for group in self.stats if group.prompt_index <= last]
        self.unscored = [group for group in self.unscored if group.prompt_index <= last]
        self.num_surplus_unseen = sum(group.is_mixed for group in unseen)
        self.num_tokens_stopped += sum(group.num_generated for group in unseen)

    def batch(
        self, kept: Sequence[Group], stale: Sequence[Group], saved_groups: SavedGroups
    ) -> SampledBatch:
        """Return the batch of `kept`, of which `stale` have tokens of earlier weights."""
        lengths = [n for group in self.stats for n in group.lengths]
        num_responses = len(lengths)
        sampled = [*self._mixed_groups(kept, stale), *self.rejected.counted(self.stats)]
        return SampledBatch(
            groups=tuple(kept),
            num_sampled=len(self.stats),
            num_all_correct=sum(s.num_correct == s.num_responses for s in self.stats),
            num_all_wrong=sum(not s.num_correct for s in self.stats),
            num_unscored=len(self.unscored),
            num_excluded=self.num_excluded,
            num_from_reserve=len(stale),
            num_to_reserve=len(self.to_reserve),
            num_dropped=len(self.dropped),
            num_surplus=len(self.surplus) + self.num_surplus_unseen,
            num_stopped=self.num_stopped,
            num_carried=self.num_carried,
            num_resting=self.num_resting,
            num_from_journal=self.num_from_journal,
            num_tokens=sum(group.num_generated for group in self.stats),
            num_tokens_stopped=self.num_tokens_stopped,
            reward_seconds=self.reward_seconds,
            accuracy=_ratio(sum(s.num_correct for s in self.stats), num_responses),
            reward_mean=_ratio(sum(s.reward_sum for s in self.stats), num_responses),
            reward_parts=_part_means([*self.stats, *self.unscored]),
            truncated_fraction=_ratio(sum(s.num_truncated for s in self.stats), num_responses),
            response_lengths=tuple(lengths),
            group_seconds=tuple(group.seconds for group in self.stats),
            engines=tuple(self.engines),
            **_tool_use(self.stats),
            saved=choose_saved(sampled, saved_groups),
        )

    def _mixed_groups(self, kept: Sequence[Group], stale: Sequence[Group]) -> list[SampledGroup]:
        old = {group.prompt_index for group in stale}
        dispositions: tuple[tuple[Disposition, Sequence[Group]], ...] = (
            ("trained", kept),
            ("to_reserve", self.to_reserve),
            ("dropped", self.dropped),
            ("dropped", self.surplus),
        )
        return [
            SampledGroup(
                group=group, disposition=disposition, from_reserve=group.prompt_index in old
            )
            for disposition, groups in dispositions
            for group in groups
        ]


@dataclass(kw_only=True)
class SamplingStep:
    """The step in progress: its plan, its open requests and its groups so far."""

    plan: Plan
    pool: ScoringPool
    counters: StepCounters
    kept: dict[int, Group] = field(default_factory=dict)
    """Mixed groups by prompt index."""
    stopped: list[int] = field(default_factory=list)
    """Prompt indices of cancelled requests."""
    digests: dict[int, bytes] = field(default_factory=dict)
    """Digest of each request by prompt index, if there is a journal."""

    def add(self, group: Group, *, is_mixed: bool) -> None:
        """Keep a finished group if it is mixed, otherwise only its statistics."""
        self.plan.finish(group.prompt_index, is_mixed)
        self.counters.stats.append(GroupStats.from_group(group, is_mixed=is_mixed))
        if is_mixed:
            self.kept[group.prompt_index] = group
        else:
            self.counters.rejected.add(group)

    def leave_out(self, group: Group) -> None:
        """Give up a group with too few scored responses; it says nothing about its prompt."""
        self.plan.finish(group.prompt_index, is_mixed=False)
        self.counters.unscored.append(group)

    def drop_unneeded(self) -> None:
        """Cancel groups that can no longer get into the batch."""
        if self.plan.is_full or not (indices := self.plan.cannot_make_batch()):
            return
        self.plan.drop(indices)
        self.stopped += indices
        self.counters.num_tokens_stopped += self.pool.drop(indices)

    def stop(self, *, keep: bool) -> Sequence[OpenGroup]:
        """Stop open groups; `keep`: return them, to be continued in the next step."""
        num_open = len(self.plan.open)
        report = self.pool.stop(keep=keep)
        if keep:
            self.counters.num_carried = num_open
        else:
            self.stopped += self.plan.open
            self.counters.num_tokens_stopped += report.num_tokens
        self.counters.num_stopped = len(self.stopped)
        self.counters.stats.sort(key=lambda group: group.prompt_index)
        return report.unfinished

    def surplus(self, chosen: Collection[int]) -> list[Group]:
        """Return mixed groups that are not in the batch, by prompt index."""
        return [self.kept[index] for index in sorted(self.kept.keys() - set(chosen))]


def choose_saved(groups: Sequence[SampledGroup], limit: SavedGroups) -> tuple[SampledGroup, ...]:
    """Choose the groups of a step to save, and return them by prompt index.

    Places are shared among the dispositions. Within one they are spread evenly over the prompt
    indices, so a repeated step saves the same groups.
    """
    ordered = sorted(groups, key=lambda sampled: sampled.group.prompt_index)
    if limit == "all" or limit >= len(ordered):
        return tuple(ordered)
    by_disposition: dict[Disposition, list[SampledGroup]] = defaultdict(list)
    for sampled in ordered:
        by_disposition[sampled.disposition].append(sampled)
    shares: Counter[Disposition] = Counter()
    turns = cycle(_TURNS)
    while shares.total() < limit:
        disposition = next(turns)
        shares[disposition] += shares[disposition] < len(by_disposition[disposition])
    chosen = {
        members[place * len(members) // shares[disposition]].group.prompt_index
        for disposition, members in by_disposition.items()
        for place in range(shares[disposition])
    }
    return tuple(sampled for sampled in ordered if sampled.group.prompt_index in chosen)


def describe_shortfall(
    num_found: int, num_needed: int, histogram: Mapping[int, int], num_responses: int
) -> str:
    """Return the message for a batch with too few mixed groups, with a histogram and advice."""
    num_asked = sum(histogram.values())
    num_wrong = histogram.get(0, 0)
    num_correct = histogram.get(num_responses, 0)
    bars = "\n".join(
        f"  {correct:>3} of {num_responses} correct: {count} groups"
        for correct, count in sorted(histogram.items())
    )
    advice = (
        "the problems are too hard for the model, or the scorer cannot read the answers: check both"
        if num_wrong >= num_correct
        else "the problems are too easy for the model: use harder ones"
    )
    return (
        f"the batch has only {num_found} of {num_needed} groups after {num_asked} requests: "
        f"{num_wrong} groups were all incorrect, {num_correct} all correct\n{bars}\n{advice}, or "
        "raise sampling.responses_per_prompt or sampling.max_asked_per_prompt"
    )


def _tool_use(stats: Sequence[GroupStats]) -> dict[str, float]:
    """Return the statistics of tools and branches, by their field of SampledBatch."""
    num_tokens = sum(n for group in stats for n in group.lengths)
    rises = [rise for group in stats for rise in group.entropy_rises]
    measured = [rise for rise in rises if not math.isnan(rise)]
    return {
        "calls_per_response": _ratio(
            sum(s.num_calls for s in stats), sum(s.num_responses for s in stats)
        ),
        "output_token_share": _ratio(sum(s.num_output_tokens for s in stats), num_tokens),
        "branches_per_group": _ratio(sum(s.num_branches for s in stats), len(stats)),
        "entropy_rise_mean": _ratio(math.fsum(measured), len(measured)),
    }


def _part_means(stats: Iterable[GroupStats | Group]) -> dict[str, float]:
    """Return the mean of each reward part, by name in alphabetical order."""
    values: dict[str, list[float]] = defaultdict(list)
    for group in stats:
        for name, value in group.parts:
            values[name].append(value)
    return {name: math.fsum(found) / len(found) for name, found in sorted(values.items())}


def _ratio(part: float, whole: int) -> float:
    return part / whole if whole else math.nan
