"""Advantages where a KL divergence to the reference policy is taken off the rewards, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megadapo.algorithm.advantages import response_advantages, whitened
from megadapo.algorithm.config import AdvantageRule


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
    """The advantage of every token of a step: [N] float64, NaN where a KL divergence is not finite.

    reinforce++ credits a token with what follows it: R_i - kl_coef sum_{s >= t} KL_s, whitened over
    all tokens (arXiv 2501.03262). The other rules compare whole responses: their reward is R_i -
    kl_coef sum_s KL_s, as in RLOO (arXiv 2402.14740).

    Args:
        rewards: [S] shaped rewards, one group after the other.
        kl: [N] estimate of each token, one response after the other.
        num_tokens: [S] tokens of each response, N in all.
        group_sizes: [K] responses of each group.
        kl_coef: weight of the KL divergence.
        rule: one of `AdvantageRule`.
        normalize_by_std: as in `response_advantages`.
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
