"""Advantages of a step's responses, or of their tokens, from shaped rewards, in float64.

Sources: GRPO (arXiv 2402.03300) and DAPO (arXiv 2503.14476) equation 9; Dr. GRPO (arXiv
2503.20783); RLOO (arXiv 2402.14740); REINFORCE++ (arXiv 2501.03262); MaxRL (arXiv 2602.02710).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megadapo.algorithm.config import AdvantageRule, AlgorithmConfig
from megadapo.algorithm.groups import ScoredGroup, Steps
from megadapo.algorithm.loss_weights import kept_responses
from megadapo.algorithm.shaping import shaped_rewards, shaped_steps

ROUNDING = 1e-12
"""Share of the largest reward by which rewards may differ and be the same: several hundred times
what is lost where a few weighted scores are added up."""

Advantages = np.ndarray | Sequence[np.ndarray]
"""[S] of each response, given to all of its tokens; or for each response those of its tokens."""


def advantages(
    groups: Sequence[ScoredGroup],
    config: AlgorithmConfig,
    *,
    max_response_tokens: int,
    rewards: np.ndarray | None = None,
) -> Advantages:
    """Return the advantage of every response of a step, [S]; with grpo-process of its tokens, [n].

    With gae it is the response's reward: the critic's ranks make the advantages of tokens.

    Args:
        rewards: [S] result of `response_rewards` if the caller has it.
    """
    if config.compares_steps:
        return [
            of_tokens
            for group in groups
            for of_tokens in process_advantages(
                shaped_steps(group, config, max_response_tokens=max_response_tokens),
                group.lengths,
                normalize_by_std=config.normalize_by_std,
            )
        ]
    lengths = np.array([n for group in groups for n in group.num_sampled], dtype=np.int64)
    if rewards is None:
        rewards = response_rewards(groups, config, max_response_tokens=max_response_tokens)
    return response_advantages(
        rewards,
        [len(group.lengths) for group in groups],
        lengths * kept_responses(groups, config),
        rule=config.advantage,
        normalize_by_std=config.normalize_by_std,
    )


def response_rewards(
    groups: Sequence[ScoredGroup], config: AlgorithmConfig, *, max_response_tokens: int
) -> np.ndarray:
    """The shaped reward of every response of a step: [S] float64."""
    parts = [
        shaped_rewards(group, config, max_response_tokens=max_response_tokens) for group in groups
    ]
    rewards: np.ndarray = np.concatenate(parts)
    return rewards


def response_advantages(
    rewards: np.ndarray,
    group_sizes: Sequence[int] | np.ndarray,
    num_tokens: np.ndarray,
    *,
    rule: AdvantageRule,
    normalize_by_std: bool,
) -> np.ndarray:
    """The advantage of every response of a step from its reward: [S] float64.

    Args:
        rewards: [S], one group after the other.
        group_sizes: [K] responses of each group.
        num_tokens: [S] tokens of each response that count; 0 for one left out of the loss.
        rule: one of `AdvantageRule`.
        normalize_by_std: False leaves grpo's division out (Dr. GRPO).
    """
    parts = [
        group_advantages(group, rule=rule, normalize_by_std=normalize_by_std)
        for group in np.split(rewards, np.cumsum(group_sizes)[:-1])
    ]
    values: np.ndarray = np.concatenate(parts)
    if rule in ("reinforce++", "reinforce++-baseline"):
        return whitened(values, num_tokens)
    return values


def group_advantages(
    rewards: Sequence[float] | np.ndarray,
    *,
    rule: AdvantageRule = "grpo",
    normalize_by_std: bool = True,
) -> np.ndarray:
    """What a group alone says of its G responses, before any whitening over the step.

    grpo: (R_i - mean) / std, with the unbiased standard deviation (G - 1), as in verl and TRL.
    grpo-process: the same, of scores of steps; `process_advantages` gives them to tokens.
    rloo: R_i less the mean of the others, which is G / (G - 1) (R_i - mean).
    reinforce++: R_i itself. reinforce++-baseline: R_i - mean.
    maxrl: (R_i - mean) / mean, where the better reward counts as 1 and the other as 0.
    gae: R_i itself, from which `gae.generalized_advantages` makes those of tokens.
    A group whose rewards are all equal, but for rounding, has no signal and gets zeros, also for
    G = 1, but by reinforce++ and gae.

    Args:
        rewards: [G], shaped rewards of one group.
        rule: one of `AdvantageRule`.
        normalize_by_std: False leaves grpo's division out (Dr. GRPO).

    Returns:
        [G] float64.

    Raises:
        ValueError: no rewards, one that is not finite, or for maxrl others than 1 and 0, or 1
            and -1.
    """
    values = np.asarray(rewards, dtype=np.float64)  # [G]
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"rewards must be a non-empty vector, got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"rewards of a group must be finite, got {values.tolist()}")
    if rule in ("reinforce++", "gae"):
        return values
    if rule == "maxrl":
        values = _binary(values)
    if _all_equal(values):
        return np.zeros_like(values)
    centered: np.ndarray = values - values.mean()
    if rule in ("grpo", "grpo-process") and normalize_by_std:
        centered /= values.std(ddof=1)
    elif rule == "rloo":
        centered *= values.size / (values.size - 1)
    elif rule == "maxrl":
        centered /= values.mean()
    return centered


def process_advantages(
    steps: Sequence[Steps], lengths: Sequence[int], *, normalize_by_std: bool = True
) -> list[np.ndarray]:
    """The advantages of the tokens of a group's G responses: [n] float64 of each.

    Process supervision (arXiv 2402.03300, section 4.1.3): the scores of all steps of all responses
    are normalised together, and a token gets the sum over the steps that end at or after it. With
    one step a response that is grpo; the definition is `reference.process_advantages`.

    Args:
        steps: [G] of each response; one at least has a step.
        lengths: [G] tokens of each response, behind which no step ends.
        normalize_by_std: as in `group_advantages`.
    """
    scores = [score for own in steps for _, score in own]
    normalized = group_advantages(scores, normalize_by_std=normalize_by_std)
    edges = np.cumsum([len(own) for own in steps])
    advantages = []
    for own, values, length in zip(steps, np.split(normalized, edges[:-1]), lengths, strict=True):
        at_end = np.zeros(length + 1)
        np.add.at(at_end, [end for end, _ in own], values)
        advantages.append(np.cumsum(at_end[:0:-1])[::-1])
    return advantages


def whitened(values: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
    """Advantages [S] less their mean over all tokens, over their unbiased standard deviation.

    Zeros where all are equal, but for rounding.

    Args:
        values: [S], the same for each token of a response.
        num_tokens: [S] tokens of each response that count; 0 for one left out of the loss.
    """
    counted = values[num_tokens > 0]
    total = num_tokens.sum()
    if not len(counted) or _all_equal(counted):
        return np.zeros_like(values)
    centered: np.ndarray = values - (values * num_tokens).sum() / total
    variance = (centered**2 * num_tokens).sum() / (total - 1)
    whitened_values: np.ndarray = centered / np.sqrt(variance)
    return whitened_values


def _all_equal(values: np.ndarray) -> bool:
    """Whether values differ by no more than rounding: over it, a deviation would make it size 1."""
    return bool(np.ptp(values) <= ROUNDING * np.abs(values).max())


def _binary(rewards: np.ndarray) -> np.ndarray:
    """1 for a right response, 0 for a wrong one, from rewards of 1 and 0, or 1 and -1."""
    if not set(rewards.tolist()) <= {1.0, 0.0} and not set(rewards.tolist()) <= {1.0, -1.0}:
        raise ValueError(
            'algorithm.advantage = "maxrl" needs rewards of 1 and 0, or 1 and -1, got '
            f"{rewards.tolist()}"
        )
    return (rewards > 0).astype(np.float64)
