"""Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def overlong_penalty(length: int, *, max_length: int, buffer: int) -> float:
    """0 up to max_length - buffer, linearly down to -1 at max_length, -1 beyond.

    Args:
        length: response tokens, end-of-sequence token included.
        max_length: the limit L_max in tokens.
        buffer: the interval L_cache in tokens; 0 turns the punishment off.
    """
    if buffer == 0:
        return 0.0
    return min(0.0, max(-1.0, (max_length - buffer - length) / buffer))


def shaped_rewards(
    rewards: Sequence[float],
    lengths: Sequence[int],
    *,
    max_length: int,
    buffer: int,
    factor: float = 1.0,
) -> np.ndarray:
    """The correctness rewards of a group plus each response's overlong punishment, [G] float64."""
    penalties = [overlong_penalty(n, max_length=max_length, buffer=buffer) for n in lengths]
    return np.asarray(rewards, dtype=np.float64) + factor * np.asarray(penalties)
