"""Advantages of a step's responses or tokens from shaped rewards, in float64; dynamic sampling.

Sources: GRPO (arXiv 2402.03300) and DAPO (arXiv 2503.14476) equations 9, 11 and 13; Dr. GRPO (arXiv
2503.20783); RLOO (arXiv 2402.14740); REINFORCE++ (arXiv 2501.03262); MaxRL (arXiv 2602.02710).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megadapo.algorithm.config import AdvantageRule, AlgorithmConfig
from megadapo.algorithm.groups import ScoredGroup, Steps
from megadapo.algorithm.loss_weights import kept_responses, num_sampled


def overlong_penalty(length: int, *, max_length: int, buffer: int) -> float:
    """Return 0 up to max_length - buffer, then linearly down to -1 at max_length, -1 beyond.

    Args:
        buffer: the interval L_cache in tokens; 0 turns the punishment off.
    """
    if buffer == 0:
        return 0.0
    return min(0.0, max(-1.0, (max_length - buffer - length) / buffer))


def overlong_penalties(
    lengths: Sequence[int] | np.ndarray, config: AlgorithmConfig, *, max_response_tokens: int
) -> np.ndarray:
    """Return the scaled punishment of each response length: [G] float64, at most 0."""
    penalties = [
        overlong_penalty(n, max_length=max_response_tokens, buffer=config.overlong_buffer)
        for n in lengths
    ]
    return config.overlong_factor * np.asarray(penalties, dtype=np.float64)


def shaped_rewards(
    group: ScoredGroup, config: AlgorithmConfig, *, max_response_tokens: int
) -> np.ndarray:
    """Return a group's rewards plus each response's overlong punishment, [G] float64."""
    penalties = overlong_penalties(group.lengths, config, max_response_tokens=max_response_tokens)
    shaped: np.ndarray = np.asarray(group.rewards, dtype=np.float64) + penalties
    return shaped


def shaped_steps(
    group: ScoredGroup, config: AlgorithmConfig, *, max_response_tokens: int
) -> list[Steps]:
    """Return [G] each response's steps, its overlong punishment added to the last score."""
    penalties = overlong_penalties(group.lengths, config, max_response_tokens=max_response_tokens)
    return [
        (*steps[:-1], (steps[-1][0], steps[-1][1] + float(penalty)))
        for steps, penalty in zip(complete_steps(group), penalties, strict=True)
    ]


def complete_steps(group: ScoredGroup) -> list[Steps]:
    """Return [G] each response's steps; without any, the whole response with its reward."""
    given = group.steps or ((),) * len(group.lengths)
    return [
        steps or ((length, reward),)
        for steps, length, reward in zip(given, group.lengths, group.rewards, strict=True)
    ]


ROUNDING = 1e-6
"""Relative difference below which rewards count as equal: several times the rounding error of
scores in fp32, as models give them."""
MIN_DEVIATION = 1e-9
"""Smallest standard deviation that rewards are divided by. Without it the rounding error of scores
that cancel would be trained on like any other difference."""

Advantages = np.ndarray | Sequence[np.ndarray]
"""[S] one per response, for all of its tokens; or for each response an array with its tokens'."""


def advantages(
    groups: Sequence[ScoredGroup],
    config: AlgorithmConfig,
    *,
    max_response_tokens: int,
    rewards: np.ndarray | None = None,
    num_tokens: Sequence[int] | None = None,
) -> Advantages:
    """Return the advantages of a step's responses, or of their tokens.

    Tokens of a response differ with grpo-process. With gae the result is the responses' rewards,
    or at each token the sum of the scores of its step and of all later ones: the critic's ranks
    compute the advantages of tokens from them (`gae.token_rewards`).

    Args:
        rewards: [S] result of `response_rewards`; None: computed here.
        num_tokens: [S] tokens of each response in the loss; None: all sampled ones.
    """
    has_steps = any(steps for group in groups for steps in group.steps)
    if config.compares_steps or (config.advantage == "gae" and has_steps):
        return [
            of_tokens
            for group in groups
            for of_tokens in process_advantages(
                shaped_steps(group, config, max_response_tokens=max_response_tokens),
                group.lengths,
                rule=config.advantage,
                normalize_by_std=config.normalize_by_std,
                # the critic's ranks discount by tokens
                discount=config.discount if config.compares_steps else 1.0,
            )
        ]
    counts = num_sampled(groups) if num_tokens is None else num_tokens
    if rewards is None:
        rewards = response_rewards(groups, config, max_response_tokens=max_response_tokens)
    return response_advantages(
        rewards,
        [len(group.lengths) for group in groups],
        np.array(counts, dtype=np.int64) * kept_responses(groups, config),
        rule=config.advantage,
        normalize_by_std=config.normalize_by_std,
    )


def response_rewards(
    groups: Sequence[ScoredGroup], config: AlgorithmConfig, *, max_response_tokens: int
) -> np.ndarray:
    """Return the shaped reward of every response of a step: [S] float64."""
    rewards: np.ndarray = np.concatenate(
        [shaped_rewards(group, config, max_response_tokens=max_response_tokens) for group in groups]
    )
    return rewards


def response_advantages(
    rewards: np.ndarray,
    group_sizes: Sequence[int] | np.ndarray,
    num_tokens: np.ndarray,
    *,
    rule: AdvantageRule,
    normalize_by_std: bool,
) -> np.ndarray:
    """Return the advantage of every response of a step from its reward: [S] float64.

    Args:
        rewards: [S], one group after the other.
        group_sizes: [K] responses of each group.
        num_tokens: [S] tokens of each response in the loss; 0 for a response left out.
        normalize_by_std: False omits grpo's division (Dr. GRPO).
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
    """Return the advantages of a group's G responses, before any whitening over the step.

    grpo: (R_i - mean) / std, with the unbiased standard deviation (G - 1), as in verl and TRL, of
    MIN_DEVIATION or more.
    grpo-process: the same, of scores of steps; `process_advantages` gives them to tokens.
    rloo: R_i less the mean of the others, which is G / (G - 1) (R_i - mean).
    reinforce++: R_i itself. reinforce++-baseline: R_i - mean.
    maxrl: (R_i - mean) / mean, where the better reward counts as 1 and the other as 0.
    gae: R_i itself, the input of `gae.generalized_advantages`.
    A group whose rewards are all equal up to rounding gets zeros, also for G = 1; with reinforce++
    and gae it keeps its rewards.

    Args:
        normalize_by_std: False omits grpo's division (Dr. GRPO).

    Returns:
        [G] float64.

    Raises:
        ValueError: rewards are empty or not finite, or for maxrl not all 1 and 0, or 1 and -1.
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
        centered /= max(values.std(ddof=1), MIN_DEVIATION)
    elif rule == "rloo":
        centered *= values.size / (values.size - 1)
    elif rule == "maxrl":
        centered /= values.mean()
    return centered


def process_advantages(
    steps: Sequence[Steps],
    lengths: Sequence[int],
    *,
    rule: AdvantageRule = "grpo-process",
    normalize_by_std: bool = True,
    discount: float = 1.0,
) -> list[np.ndarray]:
    """Return the advantages of the tokens of a group's G responses: [n] float64 of each.

    Process supervision (arXiv 2402.03300, section 4.1.3): the scores of all steps of all responses
    are normalised together. A token gets the sum over its step and all later ones, each of them
    discounted once more. With one step per response that is grpo. The definition is
    `reference.process_advantages`. With gae the scores stay as they are.

    Args:
        steps: [G] steps of each response; at least one response has a step.
        lengths: [G] tokens of each response, an upper bound of its steps' ends.
        discount: factor per step.
    """
    scores = [score for own in steps for _, score in own]
    normalized = group_advantages(scores, rule=rule, normalize_by_std=normalize_by_std)
    edges = np.cumsum([len(own) for own in steps])
    advantages = []
    for own, values, length in zip(steps, np.split(normalized, edges[:-1]), lengths, strict=True):
        from_step = np.zeros(len(own) + 1)
        for number in reversed(range(len(own))):
            from_step[number] = values[number] + discount * from_step[number + 1]
        step_of = np.searchsorted([end for end, _ in own], np.arange(length), side="right")
        advantages.append(from_step[step_of])
    return advantages


def advantages_with_kl(
    rewards: np.ndarray,
    kl: np.ndarray,
    num_tokens: np.ndarray,
    group_sizes: Sequence[int] | np.ndarray,
    *,
    kl_coef: float,
    rule: AdvantageRule,
    normalize_by_std: bool,
) -> np.ndarray:
    """Return the advantage of every token of a step with the KL divergence in the reward.

    reinforce++ credits a token with the rest of its response: R_i - kl_coef sum_{s >= t} KL_s,
    whitened over all tokens (arXiv 2501.03262). The other rules compare whole responses: their
    reward is R_i - kl_coef sum_s KL_s, as in RLOO (arXiv 2402.14740).

    Args:
        rewards: [S] shaped rewards, one group after the other.
        kl: [N] estimate of each token, one response after the other.
        num_tokens: [S] tokens of each response, N in all.
        group_sizes: [K] responses of each group.

    Returns:
        [N] float64; all NaN if any KL estimate is not finite.
    """
    if not np.isfinite(kl).all():
        return np.full(len(kl), np.nan)
    penalties = [kl_coef * part for part in np.split(kl, np.cumsum(num_tokens)[:-1])]
    if rule == "reinforce++":
        returns = [
            reward - np.cumsum(part[::-1])[::-1]
            for reward, part in zip(rewards, penalties, strict=True)
        ]
        return whitened(np.concatenate(returns), np.ones(len(kl)))
    values = response_advantages(
        rewards - np.array([part.sum() for part in penalties]),
        group_sizes,
        num_tokens,
        rule=rule,
        normalize_by_std=normalize_by_std,
    )
    return np.repeat(values, num_tokens)


def whitened(values: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
    """Return (values - mean) / std over all tokens, with the unbiased standard deviation.

    The deviation is MIN_DEVIATION or more. Values that are all equal up to rounding become zeros.

    Args:
        values: [S], the same for each token of a response.
        num_tokens: [S] tokens of each response in the loss; 0 for a response left out.
    """
    counted = values[num_tokens > 0]
    total = num_tokens.sum()
    if not len(counted) or _all_equal(counted):
        return np.zeros_like(values)
    centered: np.ndarray = values - (values * num_tokens).sum() / total
    variance = (centered**2 * num_tokens).sum() / (total - 1)
    whitened_values: np.ndarray = centered / max(np.sqrt(variance), MIN_DEVIATION)
    return whitened_values


def is_mixed(
    correct: Sequence[bool], *, min_accuracy: float = 0.0, max_accuracy: float = 1.0
) -> bool:
    """Return whether min_accuracy < number correct / G < max_accuracy (dynamic sampling).

    The shaped reward does not count: wrong answers that differ only in length have different
    shaped rewards, and training on them teaches length alone.
    """
    return min_accuracy < sum(correct) / len(correct) < max_accuracy


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Return whether rewards of a group differ by more than rounding and MIN_DEVIATION."""
    values = np.asarray(rewards, dtype=np.float64)
    return not _all_equal(values) and bool(np.ptp(values) > MIN_DEVIATION)


def has_mixed_steps(group: ScoredGroup) -> bool:
    """Return whether a token has an advantage other than 0 from its steps, without punishments.

    An all-correct or all-incorrect group has one too if the scores of its steps differ.
    """
    found = process_advantages(complete_steps(group), group.lengths)
    return any((np.abs(own) > ROUNDING).any() for own in found)


def _all_equal(values: np.ndarray) -> bool:
    """Return whether values are equal up to rounding, which a division by std would scale to 1."""
    return bool(np.ptp(values) <= ROUNDING * np.abs(values).max())


def _binary(rewards: np.ndarray) -> np.ndarray:
    """Return 1 for a correct response and 0 for another, from rewards of 1 and 0, or 1 and -1."""
    if not set(rewards.tolist()) <= {1.0, 0.0} and not set(rewards.tolist()) <= {1.0, -1.0}:
        raise ValueError(
            'algorithm.advantage = "maxrl" needs rewards of 1 and 0, or 1 and -1, got '
            f"{rewards.tolist()}"
        )
    return (rewards > 0).astype(np.float64)
