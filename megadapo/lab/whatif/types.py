"""Types that the driver and the trainer's ranks exchange; importable without Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megadapo.algorithm.config import AlgorithmConfig
from megadapo.data.batch import PackedBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """One objective with its advantages and loss weights of the batch."""

    algorithm: AlgorithmConfig
    batch: PackedBatch
    """The batch, with the run's own mini-batches."""
    num_mini_batches: int
    """Number of updates into which this objective divides the batch."""
    kl_reward_coef: float = 0.0
    """Coefficient of the KL divergence in the reward, in the step."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OldNumbers:
    """Numbers of the batch's tokens that an update reads from before the step's first update."""

    logprobs: np.ndarray
    """[T] float32, in the ratio's denominator; NaN on other tokens."""
    values: np.ndarray | None = None
    """[T] float32 of the critic; NaN on other tokens; None without a critic."""
    logprobs_ref: np.ndarray | None = None
    """[T] float32 of the reference policy; NaN on other tokens; None without one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenGradients:
    """Gradients of the batch's tokens, float32; NaN on other tokens."""

    d_policy: np.ndarray
    """[objectives, T] derivative of the weighted policy term in the token's log-prob."""
    distance: np.ndarray
    """[T] ||onehot - p||."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One objective's numbers over the whole batch; None if there was nothing to measure."""

    loss: float
    """Mean over the updates, all at the same weights, as are the next two."""
    grad_norm: float
    cosine: float | None
    """Cosine of the gradient with the first objective's."""
    clip_low: float | None
    clip_high: float | None
    effective_samples: float | None
    """Effective sample size of the importance weights times ratios, per token."""
    num_tokens: int
    """Number of tokens in the loss."""
    num_moved: int
    """Number of tokens whose policy term has a gradient."""
    entropy: float | None


def merged(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Return [..., T] with the numbers of the last part that has them; None without any part."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    found = known[0].copy()
    for part in known[1:]:
        np.copyto(found, part, where=np.isfinite(part))
    return found
