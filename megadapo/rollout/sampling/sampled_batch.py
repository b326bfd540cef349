"""What one step's sampling came to: the batch, its counts, and what became of every group."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megadapo.data.batch import Group
from megadapo.observe.config import SavedGroups
from megadapo.observe.rollouts.saved_group import Disposition
from megadapo.rewards.dapo_math import RewardParts
from megadapo.rollout.engine.activity import EngineActivity
from megadapo.rollout.sampling.selection import SampledGroup, choose_saved
from megadapo.rollout.types import Response


@dataclass(frozen=True, kw_only=True)
class SampledBatch:
    """The groups of one step and what was seen while they were sought.

    Accuracy, rewards, lengths and times are about the groups counted in `num_sampled`, those that
    were thrown away included; groups of earlier steps were counted when they came back.
    """

    groups: tuple[Group, ...]
    num_sampled: int
    """Groups that came back in this step: all right + all wrong + out of band + with a signal.
    Where nothing stale is used, without those asked for after the last group of the batch: they
    are asked for again, and which of them had come back depends on the engines' speed."""
    num_all_correct: int
    num_all_wrong: int
    num_from_reserve: int
    """Groups of the batch that earlier weights sampled, wholly or in part."""
    num_to_reserve: int
    """Surplus groups with a signal, kept for the next step."""
    num_dropped: int
    """Groups with a signal that the reserve had no room for, or that had grown too old in it."""
    num_surplus: int
    """Groups with a signal behind the last one of the batch, where no reserve is kept."""
    num_stopped: int
    """Groups that were ended unfinished."""
    num_carried: int
    """Unfinished groups that go on in the next step."""
    num_resting: int
    """Prompts left out because their latest answers were all right."""
    num_from_journal: int = 0
    """Groups that had come back to a process before this one, which was killed."""
    num_tokens: int | None
    """Response tokens of the groups in `num_sampled`; None where they were not generated but
    read."""
    num_tokens_stopped: int | None
    """Response tokens generated in vain, of groups stopped or dropped unseen."""
    reward_seconds: float | None
    """Time spent scoring; None where the groups were not scored but read."""
    accuracy: float
    """Share of correct responses."""
    reward_mean: float
    """Mean reward of the verifier, before any shaping."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Mean of each part of the rewards, over the responses that have it."""
    truncated_fraction: float
    """Share of responses that were cut at the length limit."""
    response_lengths: tuple[int, ...]
    """Tokens of each response, the end-of-sequence token included."""
    group_seconds: tuple[float, ...]
    """From each group's submission to its last token."""
    engines: tuple[EngineActivity, ...]
    """What each engine did in the step."""
    calls_per_response: float = math.nan
    """Tool calls; those of a beginning that responses share count for each. NaN here and below
    where there was nothing to count."""
    output_token_share: float = math.nan
    """Of response tokens, what tools put out."""
    branches_per_group: float = math.nan
    entropy_rise_mean: float = math.nan
    """Normalised entropy behind a call less that of the response's start, where measured."""
    saved: tuple[SampledGroup, ...]
    """The groups to be saved, those thrown away included."""

    @property
    def response_length_mean(self) -> float:
        """In tokens; NaN where no response came back."""
        return _share(sum(self.response_lengths), len(self.response_lengths))

    @property
    def response_length_p95(self) -> float:
        """In tokens; NaN where no response came back."""
        lengths = self.response_lengths
        return float(np.quantile(lengths, 0.95)) if lengths else float("nan")

    @property
    def num_kept(self) -> int:
        """Groups in the batch."""
        return len(self.groups)


@dataclass(frozen=True, kw_only=True)
class GroupStats:
    """What is remembered of a group that came back: numbers, no texts."""

    order: int
    prompt_id: str
    num_correct: int
    num_responses: int
    reward_sum: float
    lengths: tuple[int, ...]
    num_truncated: int
    is_mixed: bool
    seconds: float
    parts: RewardParts = ()
    """Of the rewards of all responses."""
    num_generated: int
    """Tokens sampled for it; what responses share was so once."""
    num_output_tokens: int = 0
    """Tokens of its responses that a tool put out."""
    num_calls: int = 0
    num_branches: int = 0
    entropy_rises: tuple[float, ...] = ()
    """Of each call, in normalised entropy; NaN where it was not measured."""

    @classmethod
    def of(
        cls,
        group: Group,
        *,
        is_mixed: bool,
        seconds: float,
        responses: Sequence[Response] = (),
    ) -> GroupStats:
        """`responses`: as engines gave them; none where the group was not generated but read."""
        return cls(
            order=group.order,
            prompt_id=group.prompt.id,
            num_correct=sum(group.correct),
            num_responses=len(group.correct),
            reward_sum=float(sum(group.rewards)),
            parts=tuple(part for parts in group.reward_parts for part in parts),
            lengths=group.lengths,
            num_truncated=sum(group.truncated),
            is_mixed=is_mixed,
            seconds=seconds,
            num_generated=group.num_generated,
            num_output_tokens=sum(group.lengths) - sum(group.num_sampled),
            num_calls=sum(len(one.calls) for one in responses),
            num_branches=sum(one.branch is not None for one in responses),
            entropy_rises=tuple(
                call.entropy - one.entropy for one in responses for call in one.calls
            ),
        )


def accuracy_histogram(outcomes: Iterable[GroupStats]) -> Counter[int]:
    """Count groups by their number of correct responses."""
    return Counter(outcome.num_correct for outcome in outcomes)


@dataclass
class StepCounters:
    """What one step has come to so far."""

    outcomes: list[GroupStats] = field(default_factory=list)
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
    thrown_away: RejectedGroups = field(default_factory=lambda: RejectedGroups(0))

    def forget_after(self, last: int) -> None:
        """Leave out of all counts but those of waste what was asked for after the batch's last
        group: the next step asks for it anew.

        Which of those groups came back depends on the engines' speed, so nothing may follow from
        them.
        """
        unseen = [outcome for outcome in self.outcomes if outcome.order > last]
        self.outcomes = [outcome for outcome in self.outcomes if outcome.order <= last]
        self.num_surplus_unseen = sum(outcome.is_mixed for outcome in unseen)
        self.num_tokens_stopped += sum(outcome.num_generated for outcome in unseen)

    def batch(
        self, kept: Sequence[Group], stale: Sequence[Group], saved_groups: SavedGroups
    ) -> SampledBatch:
        """The step's batch of the groups `kept`, those in `stale` not wholly of this version."""
        lengths = [n for outcome in self.outcomes for n in outcome.lengths]
        num_responses = len(lengths)
        size = self.outcomes[0].num_responses if self.outcomes else 0
        histogram = accuracy_histogram(self.outcomes)
        fates = [*self._fates(kept, stale), *self.thrown_away.groups(self.outcomes)]
        return SampledBatch(
            groups=tuple(kept),
            num_sampled=len(self.outcomes),
            num_all_correct=histogram[size] if size else 0,
            num_all_wrong=histogram[0],
            num_from_reserve=len(stale),
            num_to_reserve=len(self.to_reserve),
            num_dropped=len(self.dropped),
            num_surplus=len(self.surplus) + self.num_surplus_unseen,
            num_stopped=self.num_stopped,
            num_carried=self.num_carried,
            num_resting=self.num_resting,
            num_from_journal=self.num_from_journal,
            num_tokens=sum(outcome.num_generated for outcome in self.outcomes),
            num_tokens_stopped=self.num_tokens_stopped,
            reward_seconds=self.reward_seconds,
            accuracy=_share(sum(o.num_correct for o in self.outcomes), num_responses),
            reward_mean=_share(sum(o.reward_sum for o in self.outcomes), num_responses),
            reward_parts=_part_means(self.outcomes),
            truncated_fraction=_share(sum(o.num_truncated for o in self.outcomes), num_responses),
            response_lengths=tuple(lengths),
            group_seconds=tuple(outcome.seconds for outcome in self.outcomes),
            engines=tuple(self.engines),
            **self._tool_use(),
            saved=choose_saved(fates, saved_groups),
        )

    def _tool_use(self) -> dict[str, float]:
        """What came of tools."""
        outcomes = self.outcomes
        num_tokens = sum(n for outcome in outcomes for n in outcome.lengths)
        rises = [rise for outcome in outcomes for rise in outcome.entropy_rises]
        measured = [rise for rise in rises if not math.isnan(rise)]
        return {
            "calls_per_response": _share(
                sum(o.num_calls for o in outcomes), sum(o.num_responses for o in outcomes)
            ),
            "output_token_share": _share(sum(o.num_output_tokens for o in outcomes), num_tokens),
            "branches_per_group": _share(sum(o.num_branches for o in outcomes), len(outcomes)),
            "entropy_rise_mean": _share(math.fsum(measured), len(measured)),
        }

    def _fates(self, kept: Sequence[Group], stale: Sequence[Group]) -> list[SampledGroup]:
        """What became of every group with a signal."""
        old = {group.order for group in stale}
        fates: tuple[tuple[Disposition, Sequence[Group]], ...] = (
            ("trained", kept),
            ("to_reserve", self.to_reserve),
            ("dropped", self.dropped),
            ("dropped", self.surplus),
        )
        return [
            SampledGroup(group=group, fate=fate, from_reserve=group.order in old)
            for fate, groups in fates
            for group in groups
        ]


class RejectedGroups:
    """Of the groups without a signal, the few that may be saved; the others' texts are gone."""

    def __init__(self, limit: SavedGroups) -> None:
        """`limit`: groups that a step saves in all."""
        self._limit = limit
        self._groups: dict[Disposition, list[Group]] = defaultdict(list)

    def add(self, group: Group) -> None:
        """Keep the group as long as it is among the first asked for of its fate."""
        fate = _fate(group)
        groups = self._groups[fate]
        groups.append(group)
        if self._limit != "all" and len(groups) > self._limit:
            groups.remove(max(groups, key=lambda one: one.order))

    def groups(self, counted: Sequence[GroupStats]) -> list[SampledGroup]:
        """Those of them that count in the step."""
        orders = {outcome.order for outcome in counted}
        return [
            SampledGroup(group=group, fate=fate, from_reserve=False)
            for fate, groups in self._groups.items()
            for group in groups
            if group.order in orders
        ]


def _fate(group: Group) -> Disposition:
    if all(group.correct):
        return "all_correct"
    return "out_of_band" if any(group.correct) else "all_wrong"


def _part_means(outcomes: Iterable[GroupStats]) -> dict[str, float]:
    """The mean of each part, the names in alphabetical order."""
    values: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        for name, value in outcome.parts:
            values[name].append(value)
    return {name: math.fsum(found) / len(found) for name, found in sorted(values.items())}


def _share(part: float, whole: int) -> float:
    return part / whole if whole else math.nan
