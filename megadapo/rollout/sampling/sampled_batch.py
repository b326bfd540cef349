"""The batch of one step with its counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from megadapo.data.group import Group
from megadapo.observe.rollouts.saved_group import Disposition
from megadapo.rollout.engine.activity import EngineActivity


@dataclass(frozen=True, kw_only=True)
class SampledGroup:
    """A group with its disposition in a step."""

    group: Group
    disposition: Disposition
    from_reserve: bool
    """Whether an earlier step finished it, and counted it in its statistics."""


@dataclass(frozen=True, kw_only=True)
class SampledBatch:
    """The groups of one step and its statistics.

    Accuracy, rewards, lengths and times are over the groups in `num_sampled`, rejected ones
    included. Groups of earlier steps were counted when they finished.
    """

    groups: tuple[Group, ...]
    num_sampled: int
    """Number of groups that finished in this step: all correct, all wrong, out of band or mixed.

    If groups cannot wait for a later step, those requested after the last one of the batch do not
    count: the next step requests them again, and how many finish depends on the engines' speed."""
    num_all_correct: int
    num_all_wrong: int
    num_from_reserve: int
    """Number of groups in the batch that an earlier step finished."""
    num_to_reserve: int
    """Number of finished mixed groups that wait for a later step."""
    num_dropped: int
    """Number of mixed groups that became too old."""
    num_surplus: int
    """Number of mixed groups after the last one of the batch, if groups cannot wait."""
    num_stopped: int
    """Number of groups stopped before they finished."""
    num_carried: int
    """Number of unfinished groups that continue in the next step."""
    num_overdue: int = 0
    """Largest number of open groups that a batch with enough mixed groups waited for, because they
    would have become too old."""
    overdue_seconds: float = 0.0
    """Time for which it waited for them."""
    num_recomputed: int = 0
    """Number of tokens that engines read again after cuts."""
    num_unscored: int = 0
    """Number of groups dropped because too few of their responses have a score."""
    num_excluded: int = 0
    """Number of responses that reward functions or environments failed on, left out of all other
    counts."""
    num_from_journal: int = 0
    """Number of groups restored from the journal of a killed process."""
    num_tokens: int | None
    """Response tokens of the groups in `num_sampled`; None in a replay."""
    num_tokens_stopped: int | None
    """Response tokens of stopped or dropped groups; None in a replay."""
    reward_seconds: float | None
    """Time spent on scoring; None in a replay."""
    failures: Mapping[str, float] = field(default_factory=dict)
    """Failures of environments by metric, those of responses that were requested again included."""
    accuracy: float
    """Share of correct responses."""
    reward_mean: float
    """Mean reward of the verifier, before any shaping."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Mean of each part of the rewards, over the responses that have it."""
    truncated_fraction: float
    """Share of responses cut at the length limit."""
    response_lengths: tuple[int, ...]
    """Number of tokens of each response, including the end-of-sequence token."""
    group_seconds: tuple[float, ...]
    """Time of each group from submission to its last token."""
    engines: tuple[EngineActivity, ...]
    calls_per_response: float = math.nan
    """Mean number of calls that an environment answered; those in a shared beginning count for each
    response.

    NaN, here and in the next fields, if there was nothing to count."""
    output_token_share: float = math.nan
    """Share of response tokens that an environment wrote."""
    branches_per_group: float = math.nan
    entropy_rise_mean: float = math.nan
    """Mean difference of normalised entropy, after a tool call less at the response's start."""
    saved: tuple[SampledGroup, ...]
    """Groups to save, rejected ones included."""

    @property
    def response_length_mean(self) -> float:
        """Mean length in tokens; NaN without responses."""
        num_responses = len(self.response_lengths)
        return sum(self.response_lengths) / num_responses if num_responses else math.nan

    @property
    def response_length_p95(self) -> float:
        """95th percentile of the length in tokens; NaN without responses."""
        lengths = self.response_lengths
        return float(np.quantile(lengths, 0.95)) if lengths else math.nan

    @property
    def num_kept(self) -> int:
        """Number of groups in the batch."""
        return len(self.groups)
