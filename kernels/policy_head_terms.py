"""DAPO's objective for one token: its value and its derivative, in torch and in Triton.

Both say the formulas of `algorithm/reference.py` side by side, so that a new objective is added in
one place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megadapo.algorithm.objective import MAX_LOG_RATIO, PolicyObjective
from megadapo.kernels.policy_head_types import PolicyInputs

CLIPPED_LOW = 1
CLIPPED_HIGH = 2
DUAL_CLIPPED = 4
DROPPED = 8
"""Bits of a token's flags. A dropped token contributes to no sum and no gradient."""

KL_KINDS = {"none": 0, "k1": 1, "k2": 2, "k3": 3}

# Triton reads globals only as constexpr
_MAX_LOG_RATIO = tl.constexpr(MAX_LOG_RATIO)
_CLIPPED_LOW = tl.constexpr(CLIPPED_LOW)
_CLIPPED_HIGH = tl.constexpr(CLIPPED_HIGH)
_DUAL_CLIPPED = tl.constexpr(DUAL_CLIPPED)
_DROPPED = tl.constexpr(DROPPED)


@dataclass(frozen=True, kw_only=True)
class TokenTerms:
    """What the objective says about each token; all fp32 [R] but `flags`."""

    loss: Tensor
    """l_t, not yet weighted."""
    d_logprobs: Tensor
    """dl_t / dlogprob_t."""
    ratio: Tensor
    kl: Tensor
    """The KL estimate of the token, 0 without reference log-probs."""
    flags: Tensor
    """uint8 bits."""


def kl_kind(objective: PolicyObjective, logprobs_ref: Tensor | None) -> str:
    """Name the KL estimator that this call needs, `none` without a reference."""
    return "none" if logprobs_ref is None else objective.kl_kind


def policy_terms(
    logprobs: Tensor, entropy: Tensor, inputs: PolicyInputs, objective: PolicyObjective
) -> TokenTerms:
    """Return value and derivative of every token's loss for logprobs and entropy, fp32 [R]."""
    logprobs_old, advantages = inputs.logprobs_old, inputs.advantages
    logprobs_ref, importance_weights = inputs.logprobs_ref, inputs.importance_weights
    log_ratio = logprobs - logprobs_old
    inside = log_ratio.abs() <= MAX_LOG_RATIO
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    high = (advantages > 0) & (ratio > 1.0 + objective.clip_high)
    low = (advantages < 0) & (ratio < 1.0 - objective.clip_low)
    bound = torch.where(high, 1.0 + objective.clip_high, ratio)
    bound = torch.where(low, 1.0 - objective.clip_low, bound)
    cut = high | low
    flags = low.to(torch.uint8) * CLIPPED_LOW + high.to(torch.uint8) * CLIPPED_HIGH
    if objective.dual_clip is not None:
        dual = (advantages < 0) & (ratio > objective.dual_clip)
        bound = torch.where(dual, objective.dual_clip, bound)
        cut = cut | dual
        flags += dual.to(torch.uint8) * DUAL_CLIPPED

    kept = logprobs_old.isfinite()
    policy = -bound * advantages
    d_policy = torch.where(cut | ~inside, 0.0, -ratio * advantages)
    if importance_weights is not None:
        kept &= importance_weights.isfinite()
        policy, d_policy = policy * importance_weights, d_policy * importance_weights
    kl, d_kl = _kl_terms(logprobs, logprobs_ref, objective)
    if logprobs_ref is not None:
        kept &= logprobs_ref.isfinite()
    loss = policy + objective.kl_coef * kl - objective.entropy_coef * entropy
    zero = torch.zeros_like(ratio)
    return TokenTerms(
        loss=torch.where(kept, loss, zero),
        d_logprobs=torch.where(kept, d_policy + objective.kl_coef * d_kl, zero),
        ratio=torch.where(kept, ratio, zero),
        kl=torch.where(kept, kl, zero),
        flags=torch.where(kept, flags, DROPPED),
    )


def _kl_terms(
    logprobs: Tensor, logprobs_ref: Tensor | None, objective: PolicyObjective
) -> tuple[Tensor, Tensor]:
    """Return the KL estimate and its derivative in the log-prob, both [R]."""
    if logprobs_ref is None:
        zero = torch.zeros_like(logprobs)
        return zero, zero
    raw = logprobs_ref - logprobs
    gap = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    inside = raw.abs() <= MAX_LOG_RATIO
    if objective.kl_kind == "k1":
        value, slope = -gap, torch.ones_like(gap)
    elif objective.kl_kind == "k2":
        value, slope = 0.5 * gap.square(), -gap
    else:
        value, slope = gap.exp() - gap - 1.0, 1.0 - gap.exp()
    return value, torch.where(inside, slope, torch.zeros_like(slope))


@triton.jit
def clamp_log_ratio(x: tl.tensor) -> tl.tensor:
    # comparisons, not min and max: a NaN must reach the loss, where it is caught
    x = tl.where(x > _MAX_LOG_RATIO, _MAX_LOG_RATIO, x)
    return tl.where(x < -_MAX_LOG_RATIO, -_MAX_LOG_RATIO, x)


@triton.jit
def is_finite(x: tl.tensor) -> tl.tensor:
    return tl.abs(x) < float("inf")


@triton.jit
def token_terms(
    logprob: tl.tensor,
    entropy: tl.tensor,
    logprob_old: tl.tensor,
    advantage: tl.tensor,
    importance_weight: tl.tensor,
    logprob_ref: tl.tensor,
    ratio_low: tl.tensor,
    ratio_high: tl.tensor,
    dual_clip: tl.tensor,
    entropy_coef: tl.tensor,
    kl_coef: tl.tensor,
    HAS_DUAL_CLIP: tl.constexpr,
    KL_KIND: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """`policy_terms` for one token: (loss, d_logprob, ratio, kl, flags)."""
    log_ratio = logprob - logprob_old
    inside = tl.abs(log_ratio) <= _MAX_LOG_RATIO
    ratio = tl.exp(clamp_log_ratio(log_ratio))
    high = (advantage > 0) & (ratio > ratio_high)
    low = (advantage < 0) & (ratio < ratio_low)
    bound = tl.where(high, ratio_high, ratio)
    bound = tl.where(low, ratio_low, bound)
    cut = high | low
    flags = tl.where(low, _CLIPPED_LOW, 0) + tl.where(high, _CLIPPED_HIGH, 0)
    if HAS_DUAL_CLIP:
        dual = (advantage < 0) & (ratio > dual_clip)
        bound = tl.where(dual, dual_clip, bound)
        cut = cut | dual
        flags += tl.where(dual, _DUAL_CLIPPED, 0)

    kept = is_finite(logprob_old) & is_finite(importance_weight)
    policy = -bound * advantage * importance_weight
    d_policy = tl.where(inside & (cut == 0), -ratio * advantage * importance_weight, 0.0)
    kl = 0.0
    d_kl = 0.0
    if KL_KIND != 0:
        kept = kept & is_finite(logprob_ref)
        raw = logprob_ref - logprob
        gap = clamp_log_ratio(raw)
        if KL_KIND == 1:
            kl = -gap
            d_kl = 1.0
        elif KL_KIND == 2:
            kl = 0.5 * gap * gap
            d_kl = -gap
        else:
            kl = tl.exp(gap) - gap - 1.0
            d_kl = 1.0 - tl.exp(gap)
        d_kl = tl.where(tl.abs(raw) <= _MAX_LOG_RATIO, d_kl, 0.0)
    loss = policy + kl_coef * kl - entropy_coef * entropy
    loss = tl.where(kept, loss, 0.0)
    d_logprob = tl.where(kept, d_policy + kl_coef * d_kl, 0.0)
    ratio = tl.where(kept, ratio, 0.0)
    kl = tl.where(kept, kl, 0.0)
    flags = tl.where(kept, flags, _DROPPED)
    return loss, d_logprob, ratio, kl, flags
