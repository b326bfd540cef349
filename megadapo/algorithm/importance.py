"""Ratios of whole sequences, and importance weights of tokens that other weights sampled.

A token has up to three log-probs: mu, the engine's when it sampled the token (the behaviour
policy); pi_prox, the trainer's before the step's first update (the proximal policy); and pi, the
trainer's in the update. With recomputed log-probs the token's policy term is:

    w * -min(r A, clip(r) A)    with r = pi / pi_prox and w = bound(pi_prox / mu), a constant.

The clip limits how far the step moves the policy; w corrects for the sampling policy.
With the rollout's own log-probs there is one ratio, r = pi / mu, and no weight: the clip also cuts
tokens that drifted out of its window before the step.

Source: decoupled PPO (arXiv 2110.00641), used on stale rollouts by AReaL (arXiv 2505.24298);
truncation of the weight: Ionides, "Truncated Importance Sampling" (2008); the geometric mean over
a sequence: GSPO (arXiv 2507.18071), equations 7, 13 and 14.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from megadapo.algorithm.objective import MAX_LOG_RATIO
from megadapo.section import Section

if TYPE_CHECKING:
    from torch import Tensor

_FIXED_POINT = 2.0**36
"""2^63 holds the sum of more than a million log-ratios of MAX_LOG_RATIO at this resolution."""


class ImportanceConfig(Section, title="algorithm.importance"):
    """Correction of tokens that were sampled by earlier weights or by a different engine."""

    stale_logprobs: Literal["recompute", "rollout", "none"] = "recompute"
    """Old log-prob of a stale token's ratio. recompute: the trainer's current one, with an
    importance weight; rollout: the engine's at sampling, without a weight; none: the token is left
    out of the loss."""
    level: Literal["token", "sequence"] = "token"
    """Ratio that becomes a weight: the token's own, or the geometric mean over the weighted tokens
    of its response."""
    bound: Literal["truncate", "mask", "none"] = "truncate"
    """Treatment of a weight outside low to high: moved to the bound, set to 0, or kept."""
    low: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Lower bound of a weight."""
    high: Annotated[float, Field(ge=1.0)] = 2.0
    """Upper bound of a weight."""
    scope: Literal["stale", "all"] = "stale"
    """Tokens with a weight: stale ones only, or fresh ones too, which corrects for an engine whose
    log-probs differ from the trainer's (bfloat16)."""

    def conflicts(self) -> Iterator[str]:
        unused = self.changed("level", "bound", "low", "high")
        if self.stale_logprobs != "recompute" and self.scope == "stale" and unused:
            keys = ", ".join(f"algorithm.importance.{name}" for name in unused)
            yield (
                f"{keys}: no token is weighted with algorithm.importance.stale_logprobs = "
                f'"{self.stale_logprobs}" and scope = "stale"; leave the keys out, or weight '
                'tokens with stale_logprobs = "recompute" or scope = "all"'
            )


def sequence_means(
    log_ratios: Tensor,
    sequences: Tensor,
    *,
    num_sequences: int,
    add_up: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Return the mean of each sequence's log-ratios, [S] float64; 0 for a sequence without any.

    It is bitwise equal under every split.

    Log-ratios are clamped to +-MAX_LOG_RATIO; a NaN makes its own sequence's mean meaningless.

    Args:
        sequences: [N] int64, sequence of each token; all of a sequence's tokens must be here, or on
            ranks that `add_up` reaches.
        add_up: sums a tensor in place over the ranks that share sequences.
    """
    clamped = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # sums of integers have the same bits in every order
    fixed = (clamped.double() * _FIXED_POINT).round().long()
    totals = fixed.new_zeros(2, num_sequences)
    sums, counts = totals[0], totals[1]
    sums.index_add_(0, sequences, fixed)
    counts.index_add_(0, sequences, fixed.new_ones(len(fixed)))
    if add_up is not None:
        add_up(totals)
    return sums.double() / _FIXED_POINT / counts.clamp(min=1)


def sequence_log_ratios(
    logprobs: Tensor,
    logprobs_old: Tensor,
    sequences: Tensor,
    *,
    num_sequences: int,
    add_up: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Return log s_i of each token's sequence, [N], with s_i the geometric mean of its ratios.

    A token's ratio has the value s_i and the derivative s_i in the token's log-prob. That is
    GSPO-token (equation 14), and GSPO if a sequence has one advantage. All tokens of a sequence
    have the same bits, so a bound clips all of them or none. A mean at the clamp's edge is moved
    beyond it, where the ratio is constant.

    Args:
        logprobs: [N] under the current weights, with the same bits as in the loss.
        logprobs_old: [N], finite.
        sequences: [N] int64, sequence of each token, below `num_sequences`.
    """
    means = sequence_means(
        logprobs - logprobs_old, sequences, num_sequences=num_sequences, add_up=add_up
    )
    means = means.where(means.abs() < MAX_LOG_RATIO, 2.0 * means)
    return means.to(logprobs.dtype)[sequences].detach()


def importance_ratios(
    logprobs: Tensor,
    logprobs_rollout: Tensor,
    sequences: Tensor,
    *,
    num_sequences: int,
    level: Literal["token", "sequence"],
    add_up: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Return pi_prox / mu of each of N weighted tokens, [N] fp32.

    Log-ratios are clamped to +-MAX_LOG_RATIO. At sequence level the ratio is exp(mean log-ratio)
    over the sequence's N_i weighted tokens: the product over thousands of tokens would be 0 or the
    bound for any mismatch.

    Args:
        logprobs: [N] the trainer's before the step's first update.
        logprobs_rollout: [N] the engine's, finite.
        sequences: [N] int64, sequence of each token, below `num_sequences`; all weighted tokens of
            a sequence must be here, or on ranks that `add_up` reaches.
        add_up: as in `sequence_means`; called only at sequence level.
    """
    log_ratios = (logprobs - logprobs_rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if level == "token":
        return log_ratios.exp()
    means = sequence_means(log_ratios, sequences, num_sequences=num_sequences, add_up=add_up)
    return means.exp().to(log_ratios.dtype)[sequences]


def is_outside(ratios: Tensor, config: ImportanceConfig) -> Tensor:
    """Return whether each ratio is out of bounds, [N] bool; all False without bounds."""
    outside = (ratios < config.low) | (ratios > config.high)
    return outside & (config.bound != "none")


def bounded_weights(ratios: Tensor, config: ImportanceConfig) -> Tensor:
    """Return the weight of each token from its ratio, [N]; NaN stays NaN.

    A weight of 0 removes the token from the sum, but not from its divisor: loss weights are made
    from the counts of the whole mini-batch before ratios are known, and masked tokens must not
    increase the weight of the others.
    """
    if config.bound == "truncate":
        return ratios.clamp(config.low, config.high)
    return ratios.masked_fill(is_outside(ratios, config), 0.0)
