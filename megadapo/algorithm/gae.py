"""Advantages and value targets of tokens from a critic's values; plain arithmetic.

Sources: generalized advantage estimation (arXiv 1506.02438) equations 16 and 17; the clipped value
loss is from the code published with PPO (arXiv 1707.06347).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


def token_rewards(to_go: np.ndarray, sequences: np.ndarray) -> np.ndarray:
    """Return [N] float64 rewards of tokens, from the rewards still to come at each of them.

    A response without steps has its score at every token, so its last one gets the whole reward.
    The score of a step is at the last token that is not behind its end, also where tokens out of
    the loss, which are not passed, follow.

    Args:
        to_go: [N] sum of the rewards of a token and all later ones of its response.
        sequences: [N] sequence of each token; a sequence's tokens are neighbours, in order.
    """
    rewards = np.array(to_go, dtype=np.float64)
    inside = np.diff(sequences) == 0
    rewards[:-1][inside] -= rewards[1:][inside]
    return rewards


def generalized_advantages(
    rewards: np.ndarray,
    values: np.ndarray,
    sequences: np.ndarray,
    *,
    discount: float = 1.0,
    gae_lambda: float = 1.0,
) -> np.ndarray:
    """Return A_t = sum_k (discount gae_lambda)^k d_{t+k}, d_t = r_t + discount V_{t+1} - V_t.

    The value after a sequence's last token is 0, also if the sequence was truncated. Tokens left
    out of the loss are not passed: their neighbours then follow each other. The definition is
    `reference.generalized_advantages`. The value target is A_t + V_t.

    Args:
        values: [N] value of the state in which each token was sampled.
        sequences: [N] sequence of each token; a sequence's tokens are neighbours, in order.

    Returns:
        [N] float64, not whitened.
    """
    from scipy.signal import lfilter

    starts = _starts(sequences)
    values = np.asarray(values, dtype=np.float64)
    following = np.zeros_like(values)
    following[:-1] = values[1:]
    following[starts[1:] - 1] = 0.0
    deltas = rewards + discount * following - values
    decay = discount * gae_lambda
    advantages = np.empty_like(deltas)
    for start, stop in zip(starts, starts[1:], strict=False):
        # y_n = x_n + decay y_{n-1}, from the last token to the first
        advantages[start:stop] = lfilter([1.0], [1.0, -decay], deltas[start:stop][::-1])[::-1]
    return np.asarray(advantages)


def value_losses(
    values: Tensor, values_old: Tensor, returns: Tensor, *, value_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return half the squared error of each value, [N], and whether its clipped error is larger.

    The loss is max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2: a value outside the band
    has a gradient only if it moves the value back.

    Args:
        values_old: [N] before the step's first update.
        value_clip: c; None: no clip.
    """
    import torch

    error = values - returns
    if value_clip is None:
        return 0.5 * error.square(), torch.zeros_like(error, dtype=torch.bool)
    clipped = values.clamp(values_old - value_clip, values_old + value_clip) - returns
    is_clipped = clipped.square() > error.square()
    # torch.maximum would halve both gradients if the two errors are equal
    return 0.5 * torch.where(is_clipped, clipped, error).square(), is_clipped


def _starts(sequences: np.ndarray) -> np.ndarray:
    """Return [S + 1] the start of each sequence, and N."""
    changes = np.flatnonzero(np.diff(sequences)) + 1
    return np.concatenate([[0], changes, [len(sequences)]]) if len(sequences) else np.zeros(1, int)
