"""What the driver learns from a training step; importable without torch or Megatron."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """What one step's updates did; means are over its trained tokens."""

    loss: float
    """Mean over the mini-batches."""
    entropy: float
    """In nats."""
    ratio_mean: float
    ratio_first_max_error: float
    """Largest |ratio - 1| of the first mini-batch, whose weights are still the old ones: 0.0."""
    clip_low_fraction: float
    clip_high_fraction: float
    token_probability_mean: float
    logprob_mean: float
    """Mean log-prob of the trained tokens in nats: minus the loss of a supervised run."""
    grad_norm: float
    """Mean over the applied updates, before clipping; NaN if none was applied."""
    lr: float
    skipped_updates: int
    """Mini-batches left out because their loss or gradient was not finite."""
    num_dropped_tokens: int
    """Response tokens left out because the engine gave no finite log-prob."""
    logprob_abs_mean: float
    """Mean |trainer - engine| log-prob of tokens sampled from the present weights; NaN if none."""
    logprob_abs_max: float
    tokens_trained: int
