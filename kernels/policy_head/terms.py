"""Value and derivative of the objective for one token, in torch and in Triton.

Both implement the formulas of `algorithm/reference.py`. `TermSwitches` and `TermNumbers` describe
an objective to a kernel: a new rule changes this file, but no kernel, launch or compile case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megadapo.algorithm.objective import MAX_LOG_RATIO, PolicyObjective
from megadapo.kernels.policy_head.tiles import PolicyInputs

CLIPPED_LOW = 1
CLIPPED_HIGH = 2
DUAL_CLIPPED = 4
DROPPED = 8
"""Bits of a token's flags. A dropped token contributes to no sum and no gradient."""

GATES = ("clip", "soft", "weight", "none", "logprob")
"""Gates that a kernel can be compiled for; "logprob" is an objective without a ratio."""

# Triton reads globals only as constexpr
_MAX_LOG_RATIO = tl.constexpr(MAX_LOG_RATIO)
_CLIPPED_LOW = tl.constexpr(CLIPPED_LOW)
_CLIPPED_HIGH = tl.constexpr(CLIPPED_HIGH)
_DUAL_CLIPPED = tl.constexpr(DUAL_CLIPPED)
_DROPPED = tl.constexpr(DROPPED)


class TermSwitches(NamedTuple):
    """Compile-time choices of a kernel, which contains no code of other gates or absent terms."""

    gate: str = "clip"
    """One of `GATES`."""
    is_sequence: bool = False
    """Whether the old log-prob stands for the log of the ratio of the token's sequence."""
    has_dual_clip: bool = False
    kl_value: str = "none"
    """Estimator; "none" without a reference policy."""
    kl_gradient: str = "none"
    has_importance_weights: bool = False
    has_penalties: bool = False
    has_entropy: bool = False
    has_old_kl: bool = False


class TermNumbers(NamedTuple):
    """Numbers of the objective, one argument of a launch."""

    ratio_low: float
    ratio_high: float
    dual_clip: float
    tau_pos: float
    tau_neg: float
    weight_max: float
    old_kl_coef: float
    entropy_coef: float
    kl_coef: float


def describe_terms(
    objective: PolicyObjective,
    *,
    has_reference: bool,
    has_importance_weights: bool,
    has_penalties: bool = False,
) -> tuple[TermSwitches, TermNumbers]:
    """Return an objective and its optional inputs as a kernel's switches and numbers."""
    # the search of bounds and the choice of tokens are in the head's inputs
    gate = {"bapo": "clip", "clip_cov": "clip", "kl_cov": "none"}.get(
        objective.gate, objective.gate
    )
    switches = TermSwitches(
        gate="logprob" if objective.ratio == "none" else gate,
        is_sequence=objective.ratio == "sequence",
        has_dual_clip=objective.dual_clip is not None,
        kl_value=objective.kl_value if has_reference else "none",
        kl_gradient=objective.kl_gradient if has_reference else "none",
        has_importance_weights=has_importance_weights,
        has_penalties=has_penalties,
        has_entropy=objective.entropy_coef != 0.0,
        has_old_kl=objective.old_kl_coef != 0.0,
    )
    numbers = TermNumbers(
        ratio_low=1.0 - objective.clip_low,
        ratio_high=1.0 + objective.clip_high,
        dual_clip=float(objective.dual_clip or 0.0),
        tau_pos=objective.tau_pos,
        tau_neg=objective.tau_neg,
        weight_max=float(objective.weight_max or 0.0),
        old_kl_coef=objective.old_kl_coef,
        entropy_coef=objective.entropy_coef,
        kl_coef=objective.kl_loss_coef,
    )
    return switches, numbers


@dataclass(frozen=True, kw_only=True)
class TokenTerms:
    """The objective's terms of each token; all fp32 [R] but `flags`."""

    loss: Tensor
    """l_t, not yet weighted."""
    d_logprobs: Tensor
    """dl_t / dlogprob_t."""
    d_policy: Tensor
    """The part of it without the KL divergences."""
    ratio: Tensor
    flags: Tensor
    """Bits of each token, uint8 [R]."""


def policy_terms(
    logprobs: Tensor, entropy: Tensor, inputs: PolicyInputs, objective: PolicyObjective
) -> TokenTerms:
    """Return value and derivative of every token's loss; logprobs and entropy are fp32 [R]."""
    logprobs_ref, importance_weights = inputs.logprobs_ref, inputs.importance_weights
    switches, numbers = describe_terms(
        objective,
        has_reference=logprobs_ref is not None,
        has_importance_weights=importance_weights is not None,
        has_penalties=inputs.penalties is not None,
    )
    log_ratio = inputs.logprobs_old if switches.is_sequence else logprobs - inputs.logprobs_old
    inside = log_ratio.abs() <= MAX_LOG_RATIO
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = clamped.exp()
    policy, d_policy, flags = _gate_terms(
        logprobs, ratio, inside, inputs.advantages, switches, numbers
    )
    if inputs.penalties is not None:
        gap = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        policy = policy + inputs.penalties * gap.abs()
        d_policy = d_policy + torch.where(inside, inputs.penalties * gap.sign(), 0.0)
    kept = inputs.logprobs_old.isfinite()
    if importance_weights is not None:
        kept &= importance_weights.isfinite()
        policy, d_policy = policy * importance_weights, d_policy * importance_weights
    zero = torch.zeros_like(ratio)
    kl, d_kl = zero, zero
    if logprobs_ref is not None:
        kept &= logprobs_ref.isfinite()
        raw = logprobs_ref - logprobs
        # ratio of the policy to the one that sampled the token
        to_sampler = ratio if importance_weights is None else ratio * importance_weights
        kl, _ = _kl_terms(raw, to_sampler, inside, switches.kl_value)
        _, d_kl = _kl_terms(raw, to_sampler, inside, switches.kl_gradient)
    loss = policy + numbers.kl_coef * kl - numbers.entropy_coef * entropy
    d_logprobs = d_policy + numbers.kl_coef * d_kl
    if switches.has_old_kl:
        weight = torch.full_like(ratio, numbers.old_kl_coef)
        weight = weight if importance_weights is None else weight * importance_weights
        loss = loss + weight * (ratio - 1.0 - clamped)
        d_logprobs = d_logprobs + torch.where(inside, weight * (ratio - 1.0), zero)
    return TokenTerms(
        loss=torch.where(kept, loss, zero),
        d_logprobs=torch.where(kept, d_logprobs, zero),
        d_policy=torch.where(kept, d_policy, zero),
        ratio=torch.where(kept, ratio, zero),
        flags=torch.where(kept, flags, DROPPED),
    )


def _gate_terms(
    logprobs: Tensor,
    ratio: Tensor,
    inside: Tensor,
    advantages: Tensor,
    switches: TermSwitches,
    numbers: TermNumbers,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (policy term, its derivative in the log-prob, flags), each [R]."""
    never = torch.zeros_like(inside)
    low, high, dual = never, never, never
    match switches.gate:
        case "clip":
            high = (advantages > 0) & (ratio > numbers.ratio_high)
            low = (advantages < 0) & (ratio < numbers.ratio_low)
            bound = torch.where(high, numbers.ratio_high, ratio)
            bound = torch.where(low, numbers.ratio_low, bound)
            if switches.has_dual_clip:
                dual = (advantages < 0) & (ratio > numbers.dual_clip)
                bound = torch.where(dual, numbers.dual_clip, bound)
            policy = -bound * advantages
            slope = torch.where(low | high | dual | ~inside, 0.0, -ratio * advantages)
        case "soft":
            tau = torch.where(advantages > 0, numbers.tau_pos, numbers.tau_neg)
            passed = torch.sigmoid(tau * (ratio - 1.0))
            blocked = torch.sigmoid(tau * (1.0 - ratio))
            policy = -advantages * 4.0 / tau * passed
            slope = torch.where(inside, -advantages * 4.0 * passed * blocked * ratio, 0.0)
        case "weight":
            high = ratio > numbers.weight_max
            slope = -ratio.clamp(max=numbers.weight_max) * advantages
            policy = slope * logprobs
        case "none":
            policy = -ratio * advantages
            slope = torch.where(inside, policy, 0.0)
        case _:
            policy, slope = -advantages * logprobs, -advantages
    flags = low.to(torch.uint8) * CLIPPED_LOW + high.to(torch.uint8) * CLIPPED_HIGH
    return policy, slope, flags + dual.to(torch.uint8) * DUAL_CLIPPED


def _kl_terms(
    raw: Tensor, ratio: Tensor, ratio_moves: Tensor, estimator: str
) -> tuple[Tensor, Tensor]:
    """Return a KL estimate and its derivative in the log-prob, both [R].

    Args:
        raw: [R] log-prob of the reference policy less the policy's.
        ratio_moves: [R] whether the ratio is not clamped.
    """
    gap = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    moves = raw.abs() <= MAX_LOG_RATIO
    if estimator == "k1":
        value, slope = -gap, torch.ones_like(gap)
    elif estimator == "k2":
        value, slope = 0.5 * gap.square(), -gap
    else:
        value, slope = gap.exp() - gap - 1.0, 1.0 - gap.exp()
    slope = torch.where(moves, slope, torch.zeros_like(slope))
    if estimator == "corrected-k3":
        # the sum of both derivatives, in which e^gap cancels
        both = torch.where(moves, -gap, value)
        value, slope = ratio * value, ratio * torch.where(ratio_moves, both, slope)
    return value, slope


@triton.jit
def clamp_log_ratio(x: tl.tensor) -> tl.tensor:
    # comparisons instead of min and max: a NaN must reach the loss, where it is detected
    x = tl.where(x > _MAX_LOG_RATIO, _MAX_LOG_RATIO, x)
    return tl.where(x < -_MAX_LOG_RATIO, -_MAX_LOG_RATIO, x)


@triton.jit
def is_finite(x: tl.tensor) -> tl.tensor:
    return tl.abs(x) < float("inf")


@triton.jit
def gate_terms(
    logprob: tl.tensor,
    ratio: tl.tensor,
    inside: tl.tensor,
    advantage: tl.tensor,
    numbers: tl.tuple,
    SWITCHES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return (policy term, its derivative in the log-prob, flags) of one token."""
    flags = 0
    policy = -ratio * advantage
    slope = tl.where(inside, policy, 0.0)
    if SWITCHES.gate == "clip":
        high = (advantage > 0) & (ratio > numbers.ratio_high)
        low = (advantage < 0) & (ratio < numbers.ratio_low)
        bound = tl.where(high, numbers.ratio_high, ratio)
        bound = tl.where(low, numbers.ratio_low, bound)
        cut = high | low
        flags = tl.where(low, _CLIPPED_LOW, 0) + tl.where(high, _CLIPPED_HIGH, 0)
        if SWITCHES.has_dual_clip:
            dual = (advantage < 0) & (ratio > numbers.dual_clip)
            bound = tl.where(dual, numbers.dual_clip, bound)
            cut = cut | dual
            flags += tl.where(dual, _DUAL_CLIPPED, 0)
        policy = -bound * advantage
        slope = tl.where(cut, 0.0, slope)
    elif SWITCHES.gate == "soft":
        tau = tl.where(advantage > 0, numbers.tau_pos, numbers.tau_neg)
        passed = tl.sigmoid(tau * (ratio - 1.0))
        blocked = tl.sigmoid(tau * (1.0 - ratio))
        policy = -advantage * 4.0 / tau * passed
        slope = tl.where(inside, -advantage * 4.0 * passed * blocked * ratio, 0.0)
    elif SWITCHES.gate == "weight":
        capped = ratio > numbers.weight_max
        flags = tl.where(capped, _CLIPPED_HIGH, 0)
        slope = -tl.where(capped, numbers.weight_max, ratio) * advantage
        policy = slope * logprob
    elif SWITCHES.gate == "logprob":
        policy = -advantage * logprob
        slope = -advantage
    return policy, slope, flags


@triton.jit
def kl_terms(
    raw: tl.tensor, ratio: tl.tensor, ratio_moves: tl.tensor, ESTIMATOR: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return a KL estimate and its derivative in the log-prob for one token."""
    gap = clamp_log_ratio(raw)
    moves = tl.abs(raw) <= _MAX_LOG_RATIO
    if ESTIMATOR == "k1":
        value = -gap
        slope = 1.0
    elif ESTIMATOR == "k2":
        value = 0.5 * gap * gap
        slope = -gap
    else:
        value = tl.exp(gap) - gap - 1.0
        slope = 1.0 - tl.exp(gap)
    slope = tl.where(moves, slope, 0.0)
    if ESTIMATOR == "corrected-k3":
        both = tl.where(moves, -gap, value)
        value = ratio * value
        slope = ratio * tl.where(ratio_moves, both, slope)
    return value, slope


@triton.jit
def token_terms(
    logprob: tl.tensor,
    entropy: tl.tensor,
    logprob_old: tl.tensor,
    advantage: tl.tensor,
    importance_weight: tl.tensor,
    penalty: tl.tensor,
    logprob_ref: tl.tensor,
    numbers: tl.tuple,
    SWITCHES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return (loss, d_logprob, d_policy, ratio, flags) of one token, as `policy_terms` does."""
    log_ratio = logprob - logprob_old
    if SWITCHES.is_sequence:
        log_ratio = logprob_old
    inside = tl.abs(log_ratio) <= _MAX_LOG_RATIO
    clamped = clamp_log_ratio(log_ratio)
    ratio = tl.exp(clamped)
    policy, d_policy, flags = gate_terms(logprob, ratio, inside, advantage, numbers, SWITCHES)
    if SWITCHES.has_penalties:
        policy += penalty * tl.abs(clamp_log_ratio(log_ratio))
        sign = tl.where(log_ratio > 0, 1.0, tl.where(log_ratio < 0, -1.0, 0.0))
        d_policy += tl.where(inside, penalty * sign, 0.0)
    kept = is_finite(logprob_old)
    if SWITCHES.has_importance_weights:
        kept = kept & is_finite(importance_weight)
        policy *= importance_weight
        d_policy *= importance_weight
    kl = 0.0
    d_kl = 0.0
    if SWITCHES.kl_value != "none":
        kept = kept & is_finite(logprob_ref)
        raw = logprob_ref - logprob
        # ratio of the policy to the one that sampled the token
        to_sampler = ratio
        if SWITCHES.has_importance_weights:
            to_sampler = ratio * importance_weight
        # Triton 3.6 takes a field that is a string as an argument only under a name
        VALUE: tl.constexpr = SWITCHES.kl_value
        GRADIENT: tl.constexpr = SWITCHES.kl_gradient
        kl, slope = kl_terms(raw, to_sampler, inside, VALUE)
        value, d_kl = kl_terms(raw, to_sampler, inside, GRADIENT)
    loss = policy + numbers.kl_coef * kl - numbers.entropy_coef * entropy
    d_logprob = d_policy + numbers.kl_coef * d_kl
    if SWITCHES.has_old_kl:
        weight = numbers.old_kl_coef
        if SWITCHES.has_importance_weights:
            weight = numbers.old_kl_coef * importance_weight
        loss += weight * (ratio - 1.0 - clamped)
        d_logprob += tl.where(inside, weight * (ratio - 1.0), 0.0)
    loss = tl.where(kept, loss, 0.0)
    d_logprob = tl.where(kept, d_logprob, 0.0)
    d_policy = tl.where(kept, d_policy, 0.0)
    ratio = tl.where(kept, ratio, 0.0)
    flags = tl.where(kept, flags, _DROPPED)
    return loss, d_logprob, d_policy, ratio, flags
