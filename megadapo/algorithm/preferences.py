"""The Bradley-Terry loss of a reward model, from pairs of a chosen and a rejected response."""

from __future__ import annotations

import numpy as np


def pair_losses(chosen: np.ndarray, rejected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return -log sigmoid(chosen - rejected) of each pair, and its derivative in that difference.

    Args:
        chosen: [P] scores of the chosen responses.
        rejected: [P] scores of the rejected ones.
    """
    difference = np.asarray(chosen, dtype=np.float64) - np.asarray(rejected, dtype=np.float64)
    # the logarithm of the sigmoid of a difference far from 0 would be that of 0 or 1
    return np.logaddexp(0.0, -difference), -np.exp(-np.logaddexp(0.0, difference))


def pair_statistics(scores: np.ndarray) -> dict[str, float]:
    """Return mean loss, accuracy and margin of P pairs.

    The accuracy is the share of pairs whose chosen response has the higher score; a tie is half.
    The margin is the mean difference of scores.

    Args:
        scores: [2 P], each pair's chosen response before its rejected one.
    """
    chosen, rejected = scores[0::2], scores[1::2]
    losses, _ = pair_losses(chosen, rejected)
    return {
        "loss": float(losses.mean()),
        "accuracy": float(np.mean((chosen > rejected) + 0.5 * (chosen == rejected))),
        "margin": float((chosen - rejected).mean()),
    }
