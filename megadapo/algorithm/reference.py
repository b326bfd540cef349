"""Definition of the policy loss: plain torch, any dtype, differentiable by autograd.

Kernels and rules are tested against this file, so it is written for clarity and not for speed.
Source of each rule: docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from megadapo.algorithm.importance import sequence_log_ratios
from megadapo.algorithm.objective import MAX_LOG_RATIO, KlEstimator, PolicyObjective


def policy_loss(
    logprobs: Tensor,
    logprobs_old: Tensor,
    advantages: Tensor,
    loss_weights: Tensor,
    cu_seqlens: Tensor,
    *,
    objective: PolicyObjective,
    logprobs_ref: Tensor | None = None,
    entropy: Tensor | None = None,
    importance_weights: Tensor | None = None,
    penalties: Tensor | None = None,
) -> Tensor:
    """Return sum_t loss_weights[t] * l_t, 0-d, differentiable in logprobs and entropy.

    A token is left out of the sum, and of the mean of its sequence's log-ratios, if it has no loss
    weight or if its old log-prob, reference log-prob or importance weight is not finite.

    Args:
        logprobs: [T] of the response tokens, one response after the other.
        loss_weights: [T], the whole reduction.
        cu_seqlens: [S + 1] integers, start of each response, and T.
        logprobs_ref: [T] of the reference policy, required for a KL divergence in the loss.
        entropy: [T] in nats, required if `objective.entropy_coef` is not 0.
        importance_weights: [T] factor on each token's policy term, and on its KL divergence of the
            old policy to the policy.
        penalties: [T] coefficients of |log-prob - old log-prob| in it, which gate "kl_cov" gives to
            the tokens that it chose; gate "clip_cov" sets the advantages of such tokens to 0.

    Raises:
        ValueError: cu_seqlens do not rise from 0 to T, or a term's input is missing.
    """
    edges = cu_seqlens.tolist()
    if not edges or edges[0] != 0 or edges[-1] != len(logprobs) or edges != sorted(edges):
        raise ValueError(f"cu_seqlens must rise from 0 to T = {len(logprobs)}, got {edges}")
    kept = (loss_weights != 0) & logprobs_old.isfinite()
    for value in (logprobs_ref, importance_weights):
        kept = kept if value is None else kept & value.isfinite()
    logprobs, logprobs_old = logprobs[kept], logprobs_old[kept]
    if objective.ratio == "sequence":
        sequences = torch.repeat_interleave(cu_seqlens.diff())[kept]
        logprobs_old = sequence_log_ratios(
            logprobs.detach(), logprobs_old, sequences, num_sequences=len(cu_seqlens) - 1
        )
    losses = token_losses(
        logprobs,
        logprobs_old,
        advantages[kept],
        objective=objective,
        logprobs_ref=None if logprobs_ref is None else logprobs_ref[kept],
        entropy=None if entropy is None else entropy[kept],
        importance_weights=None if importance_weights is None else importance_weights[kept],
        penalties=None if penalties is None else penalties[kept],
    )
    return (loss_weights[kept] * losses).sum()


def token_losses(
    logprobs: Tensor,
    logprobs_old: Tensor,
    advantages: Tensor,
    *,
    objective: PolicyObjective,
    logprobs_ref: Tensor | None = None,
    entropy: Tensor | None = None,
    importance_weights: Tensor | None = None,
    penalties: Tensor | None = None,
) -> Tensor:
    """Return l_t of each token, [T], not yet weighted; arguments are those of `policy_loss`.

    With a sequence ratio logprobs_old is the result of `sequence_log_ratios`.
    """
    log_ratio = logprobs - logprobs_old
    if objective.ratio == "sequence":
        log_ratio = logprobs_old + (logprobs - logprobs.detach())
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    loss = _policy_term(logprobs, ratio, advantages, objective)
    if objective.old_kl_coef != 0.0:
        # its mean over samples of the old policy is KL(old policy || policy)
        loss = loss + objective.old_kl_coef * (ratio - 1.0 - log_ratio)
    if penalties is not None:
        loss = loss + penalties * log_ratio.abs()
    if importance_weights is not None:
        loss = loss * importance_weights
    if objective.kl_loss_coef != 0.0:
        if logprobs_ref is None:
            raise ValueError(
                f"objective.kl_coef is {objective.kl_coef} but logprobs_ref is missing"
            )
        gap = (logprobs_ref - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        # ratio of the policy to the one that sampled the token
        to_sampler = ratio if importance_weights is None else ratio * importance_weights
        value = kl_estimates(gap, to_sampler, objective.kl_value).detach()
        slope = kl_estimates(gap, to_sampler, objective.kl_gradient)
        loss = loss + objective.kl_coef * (value + (slope - slope.detach()))
    if objective.entropy_coef != 0.0:
        if entropy is None:
            raise ValueError(
                f"objective.entropy_coef is {objective.entropy_coef} but entropy is missing"
            )
        loss = loss - objective.entropy_coef * entropy
    return loss


def generalized_advantages(
    rewards: Sequence[float],
    values: Sequence[float],
    cu_seqlens: Sequence[int],
    *,
    discount: float,
    gae_lambda: float,
) -> list[float]:
    """Return A_t of each token, [T]; `gae.generalized_advantages` is tested against it.

    Args:
        rewards: [T], one response after the other.
        values: [T] value of the state in which each token was sampled.
        cu_seqlens: [S + 1] start of each response, and T.
    """
    advantages = [0.0] * len(rewards)
    for start, stop in pairwise(cu_seqlens):
        following_value = following_advantage = 0.0
        for t in range(stop - 1, start - 1, -1):
            delta = rewards[t] + discount * following_value - values[t]
            advantages[t] = delta + discount * gae_lambda * following_advantage
            following_value, following_advantage = values[t], advantages[t]
    return advantages


def process_advantages(
    steps: Sequence[Sequence[tuple[int, float]]], lengths: Sequence[int], *, discount: float = 1.0
) -> list[list[float]]:
    """Return A_t of each response's tokens; `advantages.process_advantages` is tested against it.

    Args:
        steps: [G] steps (end, score) of each response of a group; scores are not all the same.
        lengths: [G] tokens of each response.
        discount: factor for each step between a token's own step and the scored one.
    """
    scores = [score for own in steps for _, score in own]
    mean = sum(scores) / len(scores)
    std = (sum((score - mean) ** 2 for score in scores) / (len(scores) - 1)) ** 0.5
    advantages = []
    for own, length in zip(steps, lengths, strict=True):
        later = [[score for end, score in own if end > t] for t in range(length)]
        advantages.append(
            [
                sum(discount**j * (score - mean) / std for j, score in enumerate(scores))
                for scores in later
            ]
        )
    return advantages


def kl_estimates(gap: Tensor, ratio: Tensor, estimator: KlEstimator) -> Tensor:
    """Return KL(policy || reference policy) of each token, [T], estimated from the sampled token.

    Args:
        gap: [T] log-prob of the reference policy less the policy's, within +-MAX_LOG_RATIO.
        ratio: [T] policy over the policy that sampled the token, the factor of corrected-k3.
    """
    k3 = gap.exp() - gap - 1.0
    estimates = {"k1": -gap, "k2": 0.5 * gap.square(), "k3": k3, "corrected-k3": ratio * k3}
    return estimates[estimator]


def _policy_term(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, objective: PolicyObjective
) -> Tensor:
    if objective.ratio == "none":
        return -advantages * logprobs
    match objective.gate:
        case "clip" | "bapo" | "clip_cov":
            return _clipped(ratio, advantages, objective)
        case "soft":
            taus = advantages.new_tensor((objective.tau_neg, objective.tau_pos))
            tau = taus[(advantages > 0).long()]
            return -advantages * 4.0 / tau * torch.sigmoid(tau * (ratio - 1.0))
        case "weight":
            return -ratio.detach().clamp(max=objective.weight_max) * advantages * logprobs
        case "none" | "kl_cov":
            return -ratio * advantages


def _clipped(ratio: Tensor, advantages: Tensor, objective: PolicyObjective) -> Tensor:
    clipped = ratio.clamp(1.0 - objective.clip_low, 1.0 + objective.clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if objective.dual_clip is None:
        return loss
    bound = -objective.dual_clip * advantages
    return torch.where(advantages < 0, torch.minimum(loss, bound), loss)
