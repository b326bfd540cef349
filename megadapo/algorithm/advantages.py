"""Group-relative advantages (DAPO, arXiv 2503.14476, equation 9)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.groups import ScoredGroup
from megadapo.algorithm.shaping import shaped_rewards


def advantages(
    groups: Sequence[ScoredGroup], config: AlgorithmConfig, *, max_response_tokens: int
) -> np.ndarray:
    """The advantage of every response of a step, from its group's shaped rewards: [S] float64."""
    return np.concatenate(
        [
            group_advantages(
                shaped_rewards(group, config, max_response_tokens=max_response_tokens),
                normalize_by_std=config.normalize_by_std,
            )
            for group in groups
        ]
    )


def group_advantages(
    rewards: Sequence[float] | np.ndarray, *, normalize_by_std: bool = True
) -> np.ndarray:
    """(R_i - mean) / std over the G responses to one prompt.

    The standard deviation is the unbiased one (G - 1), as in verl and NeMo-RL. A group whose
    rewards are all equal has no signal and gets zeros, also for G = 1.

    Args:
        rewards: [G], shaped rewards of one group.
        normalize_by_std: False gives R_i - mean (Dr. GRPO, arXiv 2503.20783).

    Returns:
        [G] float64.
    """
    values = np.asarray(rewards, dtype=np.float64)  # [G]
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"rewards must be a non-empty vector, got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"rewards of a group must be finite, got {values.tolist()}")
    if (values == values[0]).all():
        return np.zeros_like(values)
    centered: np.ndarray = values - values.mean()
    if normalize_by_std:
        centered /= values.std(ddof=1)
    return centered
