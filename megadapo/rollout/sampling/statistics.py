"""The batch of one step with its numbers: finished and rejected groups, and those to save."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, cycle
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from megadapo.algorithm.advantages import overlong_penalties
from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.loss_weights import is_gibberish, is_repetitive
from megadapo.cluster.processes import MIB
from megadapo.codec import Measured
from megadapo.data.group import Group, RewardParts
from megadapo.observe.config import SavedGroups
from megadapo.observe.metrics.names import COUNTED
from megadapo.observe.rollouts.saved_group import Disposition
from megadapo.rollout.config import RolloutConfig, SamplingConfig
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
_NOT_REPLAYED = ("tokens/stopped", "time/reward_s")


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
    reward_range: tuple[float, float]
    """Lowest and highest reward."""
    lengths: tuple[int, ...]
    mean_logprobs: tuple[Measured, ...]
    """Mean log-prob of each response."""
    repetitions: tuple[float, ...]
    """Share of repeated n-grams in each response."""
    num_truncated: int
    is_mixed: bool
    is_one_text: bool
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
    entropy_rises: tuple[Measured, ...] = ()
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
            mean_logprobs=group.mean_logprobs,
            repetitions=group.repetitions,
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

    @property
    def level(self) -> Level:
        """The difficulty of its prompt for the policy."""
        if self.num_correct is None:
            return "mixed" if self.is_mixed else "equal"
        other: Level = "mixed" if self.num_correct else "all_wrong"
        return "all_correct" if self.num_correct == self.num_responses else other


@dataclass(kw_only=True)
class SampledBatch:
    """The groups of one step with its numbers, which grow while the step samples.

    Accuracy, rewards, lengths and times are over the groups in `stats`. Groups of earlier steps
    were counted when they finished.
    """

    groups: Annotated[tuple[Group, ...], Field(exclude=True)] = ()
    """The groups to train on; empty until the batch is taken."""
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
    counts: dict[str, int | float] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    """Metrics that are counted while the step samples, and failures of environments, those of
    responses that were requested again included."""
    engines: Sequence[EngineActivity] = ()
    overdue_since: Annotated[float | None, Field(exclude=True)] = None
    """Monotonic time since which a batch with enough mixed groups waits for others; else None."""
    rejected: list[Group] = field(default_factory=list)
    """Rejected groups that may be saved; the texts of all others are forgotten."""
    saved_groups: Annotated[SavedGroups, Field(exclude=True)] = 0
    """Number of groups that a step saves."""
    saved: Annotated[tuple[SampledGroup, ...], Field(exclude=True)] = ()
    """Groups to save, rejected ones included."""
    is_replay: Annotated[bool, Field(exclude=True)] = False
    """Whether the groups are a saved run's, so that no engine and no reward function worked."""

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
    def num_from_reserve(self) -> int:
        """Number of groups in the batch that an earlier step finished."""
        counted = {group.prompt_index for group in self.stats}
        return sum(group.prompt_index not in counted for group in self.groups)

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
        return self._per_response(lambda group: group.reward_sum)

    @property
    def truncated_fraction(self) -> float:
        """Share of responses cut at the length limit."""
        return self._per_response(lambda group: group.num_truncated)

    def _per_response(self, value: Callable[[GroupStats], float]) -> float:
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
        """Count a finished group; keep a rejected one if it is among the first of its disposition
        by prompt index."""
        self.stats.append(GroupStats.from_group(group, is_mixed=is_mixed))
        if is_mixed:
            return
        self.rejected.append(group)
        if self.saved_groups != "all":
            alike = [one for one in self.rejected if _disposition(one) == _disposition(group)]
            if len(alike) > self.saved_groups:
                self.rejected.remove(max(alike, key=lambda one: one.prompt_index))

    def count_overdue(self, num_awaited: int) -> None:
        """Count the groups that a batch with enough mixed groups waits for, and the time."""
        self.counts["groups/overdue"] = max(self.counts["groups/overdue"], num_awaited)
        now = time.monotonic()
        if self.overdue_since is not None:
            self.counts["time/overdue_s"] += now - self.overdue_since
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
        self.counts["tokens/stopped"] += sum(group.num_generated for group in unseen)

    def take(self, groups: Sequence[Group]) -> None:
        """End the step with the groups to train on, and choose the groups to save."""
        self.groups = tuple(groups)
        counted = {group.prompt_index for group in self.stats}
        mixed: dict[Disposition, Sequence[Group]] = {
            "trained": groups,
            "to_reserve": self.to_reserve,
            "dropped": [*self.dropped, *self.surplus],
        }
        sampled = [
            SampledGroup(
                group=group, disposition=name, from_reserve=group.prompt_index not in counted
            )
            for name, members in mixed.items()
            for group in members
        ]
        sampled += [
            SampledGroup(group=group, disposition=_disposition(group), from_reserve=False)
            for group in self.rejected
            if group.prompt_index in counted
        ]
        self.saved = choose_saved(sampled, self.saved_groups)

    def copy(self) -> SampledBatch:
        """Return a copy that later groups do not change."""
        return replace(
            self,
            stats=[*self.stats],
            unscored=[*self.unscored],
            dropped=[*self.dropped],
            rejected=[*self.rejected],
            counts={**self.counts},
        )

    def metrics(
        self, algorithm: AlgorithmConfig, rollout: RolloutConfig, sampling: SamplingConfig
    ) -> dict[str, float | None]:
        """Return the metrics of the step's groups, responses and engines."""
        return {
            **self.counts,
            **(dict.fromkeys(_NOT_REPLAYED) if self.is_replay else {}),
            **self._group_metrics(),
            **self._response_metrics(algorithm, rollout.max_response_tokens),
            **self._degenerate_metrics(algorithm),
            **self._tool_metrics(rollout, sampling),
            **self._engine_metrics(),
        }

    def _group_metrics(self) -> dict[str, float | None]:
        """Return counts of groups, and of the tokens that engines generated for them."""
        total = len(self.stats)
        levels: tuple[Level, ...] = ("all_correct", "all_wrong", "equal")
        num_tokens = sum(group.num_generated for group in self.stats)
        return {
            "groups/sampled": total,
            "groups/kept": len(self.groups),
            **{f"groups/{level}": self.num_at(level) for level in levels},
            **{f"groups/{level}_share": share(self.num_at(level), total) for level in levels},
            "groups/one_text_wrong": sum(
                group.is_one_text and group.level == "all_wrong" for group in self.stats
            ),
            "groups/rejected_unequal": self.num_rejected_unequal,
            "groups/from_reserve": self.num_from_reserve,
            "groups/to_reserve": len(self.to_reserve),
            "groups/dropped": len(self.dropped) + self.num_surplus,
            "groups/unscored": len(self.unscored),
            "tokens/generated": None if self.is_replay else num_tokens,
        }

    def _response_metrics(
        self, algorithm: AlgorithmConfig, max_response_tokens: int
    ) -> dict[str, float | None]:
        """Return metrics of the step's responses; null if it completed none."""
        lengths = np.array(self.response_lengths, dtype=np.float64)
        has_any = len(lengths) > 0
        penalties = overlong_penalties(lengths, algorithm, max_response_tokens=max_response_tokens)
        penalty = float(penalties.mean()) if has_any else math.nan
        p50, p95, longest = np.quantile(lengths, [0.5, 0.95, 1.0]) if has_any else [math.nan] * 3
        values = {
            "reward/mean": self.reward_mean,
            "reward/excluded": self.num_excluded,
            "reward/overlong_penalty_mean": penalty,
            "reward/shaped_mean": self.reward_mean + penalty,
            "accuracy/mean": self.accuracy,
            "response_length/mean": float(lengths.mean()) if has_any else math.nan,
            "response_length/p50": float(p50),
            "response_length/p95": float(p95),
            "response_length/max": float(longest),
            "response_length/truncated_fraction": self.truncated_fraction,
        }
        for name, value in self.reward_parts.items():
            # counts of environments have their own area
            values[name if name.startswith("environment/") else f"reward/{name}"] = value
        return {name: None if math.isnan(value) else value for name, value in values.items()}

    def _degenerate_metrics(self, algorithm: AlgorithmConfig) -> dict[str, float | None]:
        """Return the shares of gibberish and of repetitive responses; null where none is known."""
        means = [mean for group in self.stats for mean in group.mean_logprobs]
        known = [mean for mean in means if not math.isnan(mean)]
        repetitions = [one for group in self.stats for one in group.repetitions]
        num_gibberish = int(is_gibberish(known, algorithm).sum())
        num_repetitive = int(is_repetitive(repetitions, algorithm).sum())
        return {
            "degenerate/gibberish": share(num_gibberish, len(known)),
            "degenerate/repetitive": share(num_repetitive, len(repetitions)),
        }

    def _tool_metrics(
        self, rollout: RolloutConfig, sampling: SamplingConfig
    ) -> dict[str, float | None]:
        """Return metrics of tools, environments and branches; null without, and in a replay."""
        stats = [] if self.is_replay else self.stats
        of_tools = stats if rollout.environments else []
        of_branches = stats if sampling.branching.is_on else []
        num_responses = sum(group.num_responses for group in of_tools)
        num_tokens = sum(length for group in of_tools for length in group.lengths)
        num_branches = sum(group.num_branches for group in of_branches)
        rises = [rise for one in of_branches for rise in one.entropy_rises if not math.isnan(rise)]
        return {
            "tools/calls_per_response": share(sum(g.num_calls for g in of_tools), num_responses),
            "tools/token_share": share(sum(g.num_output_tokens for g in of_tools), num_tokens),
            "tools/branches_per_group": share(num_branches, len(of_branches)),
            "tools/entropy_rise": share(math.fsum(rises), len(rises)),
        }

    def _engine_metrics(self) -> dict[str, float | None]:
        """Return times of groups, and how busy the engines were."""
        engines = [engine for engine in self.engines if engine.seconds > 0]
        total = sum(engine.seconds for engine in engines)
        busy = sum(engine.busy_seconds for engine in engines)
        running = sum(engine.mean_running * engine.busy_seconds for engine in engines)
        times = [] if self.is_replay else [group.seconds for group in self.stats]
        return {
            "time/group_p50_s": float(np.quantile(times, 0.5)) if times else None,
            "time/group_p95_s": float(np.quantile(times, 0.95)) if times else None,
            "time/group_max_s": max(times, default=None),
            "rollout/engine_busy_share": share(busy, total),
            "rollout/slot_use": share(running, total),
            "rollout/engines_lost": len(self.engines) - len(engines) if self.engines else None,
            "rollout/preemptions": sum(e.num_preemptions for e in engines) if engines else None,
            "rollout/kv_use_max": max((e.max_kv_use for e in engines), default=None),
            **spread("rollout/tokens_per_s_{}", [e.num_tokens / e.seconds for e in engines]),
            **spread("rollout/engine_tokens_{}", [e.num_tokens for e in engines]),
            **spread("time/engine_{}_s", [e.busy_seconds for e in engines]),
            **spread("memory/engine_{}_mib", [e.private_bytes / MIB for e in engines]),
        }


def share(part: float, whole: float) -> float | None:
    """Return the quotient; null if there was nothing to count."""
    return part / whole if whole else None


def spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Return the smallest and the largest of several processes' values; null without values."""
    return {
        name.format("min"): min(values, default=None),
        name.format("max"): max(values, default=None),
    }


def _disposition(group: Group) -> Disposition:
    """Return why a group was rejected."""
    if group.correct is None:
        return "equal"
    other: Disposition = "out_of_band" if any(group.correct) else "all_wrong"
    return "all_correct" if all(group.correct) else other


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
