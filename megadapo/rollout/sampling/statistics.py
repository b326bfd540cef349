"""The batch of one step with its statistics: finished and rejected groups, and those to save."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, cycle
from typing import Any, Literal, Self

from megadapo.data.group import Group, RewardParts, decode_group, encode_group
from megadapo.observe.config import SavedGroups
from megadapo.observe.rollouts.saved_group import Disposition
from megadapo.rollout.types import EngineActivity

Level = Literal["unseen", "all_wrong", "mixed", "all_correct", "equal"]
"""Difficulty of a prompt, by its latest group; equal: its rewards were, and no function says what
is correct."""
UNEQUAL_SHARE = 0.25
"""Share of the range of a step's rewards by which those of a group differ if they are unequal."""
_TURNS: tuple[Disposition, ...] = (
    *("trained", "all_wrong", "trained", "all_correct"),
    *("trained", "to_reserve", "trained", "dropped", "out_of_band", "equal"),
)
"""The order in which dispositions get a place among the saved groups."""


@dataclass(frozen=True, kw_only=True)
class SampledGroup:
    """A group with its disposition in a step."""

    group: Group
    disposition: Disposition
    from_reserve: bool
    """Whether an earlier step finished it, and counted it in its statistics."""


@dataclass(frozen=True, kw_only=True)
class GroupStats:
    """The statistics of a finished group, without its tokens and texts."""

    prompt_index: int
    prompt_id: str
    num_correct: int | None
    """Number of correct responses, if a reward function says what is correct."""
    num_responses: int
    reward_sum: float
    reward_range: tuple[float, float] = (0.0, 0.0)
    """Lowest and highest reward; zeros in states of earlier versions."""
    lengths: tuple[int, ...]
    num_truncated: int
    is_mixed: bool
    is_one_text: bool = False
    """Whether several responses are all the same text."""
    seconds: float
    num_excluded: int = 0
    """Number of responses that have no score, after failures, and are left out of the group."""
    num_interrupted: int = 0
    """Number of them whose episode a restart interrupted."""
    parts: RewardParts = ()
    """Reward parts of all responses."""
    num_generated: int
    """Number of sampled tokens; shared tokens count once."""
    num_output_tokens: int = 0
    """Number of tokens that environments wrote."""
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
            num_correct=None if group.correct is None else sum(group.correct),
            num_responses=len(responses),
            num_excluded=len(group.failures),
            num_interrupted=sum(failure.is_interruption for failure in group.failures),
            reward_sum=float(sum(group.rewards)),
            reward_range=(min(group.rewards), max(group.rewards)),
            parts=group.parts,
            lengths=group.lengths,
            num_truncated=sum(group.truncated),
            is_mixed=is_mixed,
            is_one_text=len(responses) > 1 and len({one.text for one in responses}) == 1,
            seconds=group.seconds,
            num_generated=group.num_generated,
            num_output_tokens=sum(group.lengths) - sum(group.num_sampled),
            num_calls=sum(turn.is_call for response in responses for turn in response.turns),
            num_branches=sum(response.branch is not None for response in responses),
            entropy_rises=tuple(
                turn.entropy - response.entropy
                for response in responses
                for turn in response.turns
                if turn.is_call
            ),
        )

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; a rise that was not measured is None."""
        rises = [None if math.isnan(rise) else rise for rise in self.entropy_rises]
        return {**asdict(self), "entropy_rises": rises}

    @property
    def level(self) -> Level:
        """The difficulty of its prompt for the policy."""
        if self.num_correct is None:
            return "mixed" if self.is_mixed else "equal"
        other: Level = "mixed" if self.num_correct else "all_wrong"
        return "all_correct" if self.num_correct == self.num_responses else other

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        """Return the statistics that `to_json` wrote."""
        rises = tuple(math.nan if rise is None else rise for rise in entry["entropy_rises"])
        lengths, parts = tuple(entry["lengths"]), tuple(map(tuple, entry["parts"]))
        found = {**entry, "entropy_rises": rises, "parts": parts, "lengths": lengths}
        return cls(**{**found, "reward_range": tuple(entry.get("reward_range", (0.0, 0.0)))})


class RejectedGroups:
    """The rejected groups that may be saved; the texts of all others are forgotten."""

    def __init__(self, limit: SavedGroups) -> None:
        """`limit`: number of groups that a step saves."""
        self.limit = limit
        self._groups: dict[Disposition, list[Group]] = defaultdict(list)

    def add(self, group: Group) -> None:
        """Keep the group if it is among the first of its disposition by prompt index."""
        disposition: Disposition = "equal"
        if group.correct is not None and all(group.correct):
            disposition = "all_correct"
        elif group.correct is not None:
            disposition = "out_of_band" if any(group.correct) else "all_wrong"
        groups = self._groups[disposition]
        groups.append(group)
        if self.limit != "all" and len(groups) > self.limit:
            groups.remove(max(groups, key=lambda one: one.prompt_index))

    def copy(self) -> RejectedGroups:
        """Return a copy that later groups do not change."""
        copied = RejectedGroups(self.limit)
        copied._groups |= {name: [*groups] for name, groups in self._groups.items()}
        return copied

    @property
    def groups(self) -> list[Group]:
        """All groups that are kept."""
        return [group for groups in self._groups.values() for group in groups]

    def counted(self, prompt_indices: Container[int]) -> list[SampledGroup]:
        """Return the kept groups with these prompt indices."""
        return [
            SampledGroup(group=group, disposition=disposition, from_reserve=False)
            for disposition, groups in self._groups.items()
            for group in groups
            if group.prompt_index in prompt_indices
        ]


@dataclass
class StepCounters:
    """The statistics of one step so far.

    Accuracy, rewards, lengths and times are over the groups in `stats`. Groups of earlier steps
    were counted when they finished.
    """

    stats: list[GroupStats] = field(default_factory=list)
    """Groups that finished in this step: all correct, all wrong, out of band or mixed.

    If groups cannot wait for a later step, those requested after the last one of the batch do not
    count: the next step requests them again, and how many finish depends on the engines' speed."""
    unscored: list[Group] = field(default_factory=list)
    """Groups with too few scored responses; other prompts take their places."""
    to_reserve: list[Group] = field(default_factory=list)
    """Mixed groups that wait for a later step."""
    dropped: list[Group] = field(default_factory=list)
    """Mixed groups that became too old."""
    surplus: list[Group] = field(default_factory=list)
    """Mixed groups after the last one of the batch, if groups cannot wait."""
    num_surplus_unseen: int = 0
    """Number of such groups that `stats` does not have."""
    num_stopped: int = 0
    """Number of groups stopped before they finished."""
    num_carried: int = 0
    """Number of unfinished groups that continue in the next step."""
    num_overdue: int = 0
    """Largest number of open groups that a batch with enough mixed groups waited for, because they
    would have become too old."""
    overdue_seconds: float = 0.0
    """Time for which it waited for them."""
    num_recomputed: int = 0
    """Number of tokens that engines read again after cuts."""
    num_from_journal: int = 0
    """Number of groups restored from the journal of a killed process."""
    num_tokens_stopped: int = 0
    """Response tokens of stopped or dropped groups."""
    reward_seconds: float = 0.0
    failures: Mapping[str, float] = field(default_factory=dict)
    """Failures of environments by metric, those of responses that were requested again included."""
    engines: Sequence[EngineActivity] = ()
    overdue_since: float | None = None
    """Monotonic time since which a batch with enough mixed groups waits for others; else None."""
    rejected: RejectedGroups = field(default_factory=lambda: RejectedGroups(0))

    def num_at(self, level: Level) -> int:
        """Return the number of groups at a level."""
        return sum(group.level == level for group in self.stats)

    @property
    def num_rejected_unequal(self) -> int:
        """Number of groups left out as all correct or all wrong although their rewards differ."""
        ends = [end for group in self.stats for end in group.reward_range]
        least = UNEQUAL_SHARE * (max(ends, default=0.0) - min(ends, default=0.0))
        return sum(
            not group.is_mixed
            and group.level in ("all_correct", "all_wrong")
            and 0.0 < group.reward_range[1] - group.reward_range[0] >= least
            for group in self.stats
        )

    @property
    def num_surplus(self) -> int:
        """Number of mixed groups after the last one of the batch, if groups cannot wait."""
        return len(self.surplus) + self.num_surplus_unseen

    @property
    def response_lengths(self) -> list[int]:
        """Number of tokens of each response, including the end-of-sequence token."""
        return [length for group in self.stats for length in group.lengths]

    @property
    def accuracy(self) -> float:
        """Share of correct responses, where that is known; NaN without responses."""
        known = [group for group in self.stats if group.num_correct is not None]
        num_responses = sum(group.num_responses for group in known)
        num_correct = sum(group.num_correct or 0 for group in known)
        return num_correct / num_responses if num_responses else math.nan

    @property
    def reward_mean(self) -> float:
        """Mean reward before any shaping; NaN without responses, as in the next property."""
        return self.per_response(lambda group: group.reward_sum)

    @property
    def truncated_fraction(self) -> float:
        """Share of responses cut at the length limit."""
        return self.per_response(lambda group: group.num_truncated)

    def per_response(self, value: Callable[[GroupStats], float]) -> float:
        """Return the sum of a value of each group over the number of responses."""
        num_responses = sum(group.num_responses for group in self.stats)
        return sum(map(value, self.stats)) / num_responses if num_responses else math.nan

    @property
    def reward_parts(self) -> dict[str, float]:
        """Mean of each reward part over the responses that have it, in alphabetical order."""
        values: dict[str, list[float]] = defaultdict(list)
        of_groups = [group.parts for group in self.stats] + [group.parts for group in self.unscored]
        for name, value in chain(*of_groups):
            values[name].append(value)
        return {name: math.fsum(found) / len(found) for name, found in sorted(values.items())}

    @property
    def num_excluded(self) -> int:
        """Number of responses without a score, left out of all other counts."""
        of_unscored = sum(len(group.failures) for group in self.unscored)
        return of_unscored + sum(group.num_excluded for group in self.stats)

    @property
    def num_interrupted(self) -> int:
        """Number of them whose episode a restart interrupted."""
        of_unscored = sum(
            failure.is_interruption for group in self.unscored for failure in group.failures
        )
        return of_unscored + sum(group.num_interrupted for group in self.stats)

    def add(self, group: Group, *, is_mixed: bool) -> None:
        """Count a finished group, and keep it if it is rejected."""
        self.stats.append(GroupStats.from_group(group, is_mixed=is_mixed))
        if not is_mixed:
            self.rejected.add(group)

    def count_overdue(self, num_awaited: int) -> None:
        """Count the groups that a batch with enough mixed groups waits for, and the time."""
        self.num_overdue = max(self.num_overdue, num_awaited)
        now = time.monotonic()
        if self.overdue_since is not None:
            self.overdue_seconds += now - self.overdue_since
        self.overdue_since = now if num_awaited else None

    def forget_after(self, last: int) -> None:
        """Count groups after the batch's last prompt index as surplus, not in the statistics.

        The next step requests them again. Which of them finished depends on the engines' speed, so
        they must not influence anything.
        """
        unseen = [group for group in self.stats if group.prompt_index > last]
        self.stats = [group for group in self.stats if group.prompt_index <= last]
        self.unscored = [group for group in self.unscored if group.prompt_index <= last]
        self.num_surplus_unseen = sum(group.is_mixed for group in unseen)
        self.num_tokens_stopped += sum(group.num_generated for group in unseen)

    def to_json(self) -> dict[str, Any]:
        """Return what is known before a batch is taken, as JSON values."""
        return {
            **{name: getattr(self, name) for name in self._numbers()},
            "stats": [group.to_json() for group in self.stats],
            "unscored": [encode_group(group) for group in self.unscored],
            "dropped": [encode_group(group) for group in self.dropped],
            "rejected": [encode_group(group) for group in self.rejected.groups],
            "engines": [asdict(activity) for activity in self.engines],
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], saved_groups: SavedGroups) -> Self:
        """Return the counters that `to_json` wrote."""
        counters = cls(
            **{name: entry[name] for name in cls._numbers()},
            stats=[GroupStats.from_json(group) for group in entry["stats"]],
            unscored=[decode_group(group) for group in entry["unscored"]],
            dropped=[decode_group(group) for group in entry["dropped"]],
            rejected=RejectedGroups(saved_groups),
            engines=[EngineActivity(**activity) for activity in entry["engines"]],
        )
        for rejected_group in entry["rejected"]:
            counters.rejected.add(decode_group(rejected_group))
        return counters

    def copy(self) -> StepCounters:
        """Return a copy that later groups do not change."""
        return replace(
            self,
            stats=[*self.stats],
            unscored=[*self.unscored],
            dropped=[*self.dropped],
            rejected=self.rejected.copy(),
        )

    @classmethod
    def _numbers(cls) -> list[str]:
        return [name for name, value in vars(cls).items() if isinstance(value, int | float)]


@dataclass(frozen=True, kw_only=True)
class SampledBatch:
    """The groups of one step and its statistics."""

    groups: tuple[Group, ...]
    counters: StepCounters
    saved: tuple[SampledGroup, ...] = ()
    """Groups to save, rejected ones included."""
    is_replay: bool = False
    """Whether the groups are a saved run's, so that no engine and no reward function worked."""

    @classmethod
    def of(cls, groups: Sequence[Group], counters: StepCounters, *, is_replay: bool) -> Self:
        """Return the batch of a step that has ended, and choose the groups to save."""
        counted = {group.prompt_index for group in counters.stats}
        mixed: dict[Disposition, Sequence[Group]] = {
            "trained": groups,
            "to_reserve": counters.to_reserve,
            "dropped": [*counters.dropped, *counters.surplus],
        }
        sampled = [
            SampledGroup(
                group=group, disposition=name, from_reserve=group.prompt_index not in counted
            )
            for name, members in mixed.items()
            for group in members
        ]
        rejected = counters.rejected
        saved = choose_saved([*sampled, *rejected.counted(counted)], rejected.limit)
        return cls(groups=tuple(groups), counters=counters, saved=saved, is_replay=is_replay)

    @property
    def num_from_reserve(self) -> int:
        """Number of groups in the batch that an earlier step finished."""
        counted = {group.prompt_index for group in self.counters.stats}
        return sum(group.prompt_index not in counted for group in self.groups)


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
