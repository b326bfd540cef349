"""Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13) of rewards and of steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.groups import ScoredGroup, Steps


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
