"""The policy loss by definition: plain torch, any dtype, differentiable by autograd.

Kernels and rules are tested against this file, so it says what is meant and nothing about speed.
Source: DAPO (arXiv 2503.14476) equation 8; dual clip: arXiv 1912.09729 equation 5; k1, k2, k3:
Schulman, "Approximating KL Divergence" (2020).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megadapo.algorithm.objective import MAX_LOG_RATIO, PolicyObjective


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
) -> Tensor:
    """Return sum_t loss_weights[t] * l_t, 0-d, differentiable in logprobs and entropy.

    Tokens without a loss weight do not enter, nor do those whose old or reference log-prob or
    importance weight is not finite.

    Args:
        logprobs: [T] of the response tokens, one response after the other.
        logprobs_old: [T].
        advantages: [T].
        loss_weights: [T], the whole reduction.
        cu_seqlens: [S + 1] integers, where each response begins, and T.
        objective: clip range and the optional terms.
        logprobs_ref: [T] of the reference policy, needed when `objective.kl_coef` is not 0.
        entropy: [T] in nats, needed when `objective.entropy_coef` is not 0.
        importance_weights: [T] factor on each token's policy term.

    Raises:
        ValueError: cu_seqlens that do not cut T tokens, or a term without its input.
    """
    _check_seqlens(cu_seqlens, logprobs.shape[0])
    optional = {
        "logprobs_ref": logprobs_ref,
        "entropy": entropy,
        "importance_weights": importance_weights,
    }
    kept = (loss_weights != 0) & logprobs_old.isfinite()
    for value in (logprobs_ref, importance_weights):
        kept = kept if value is None else kept & value.isfinite()
    losses = token_losses(
        logprobs[kept],
        logprobs_old[kept],
        advantages[kept],
        objective=objective,
        **{name: None if value is None else value[kept] for name, value in optional.items()},
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
) -> Tensor:
    """l_t of each token, [T], not yet weighted; the arguments are those of `policy_loss`."""
    ratio = (logprobs - logprobs_old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1.0 - objective.clip_low, 1.0 + objective.clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if objective.dual_clip is not None:
        bound = -objective.dual_clip * advantages
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    if importance_weights is not None:
        loss = loss * importance_weights
    if objective.kl_coef != 0.0:
        if logprobs_ref is None:
            raise ValueError(
                f"objective.kl_coef is {objective.kl_coef} but logprobs_ref is missing"
            )
        loss = loss + objective.kl_coef * kl_estimates(logprobs, logprobs_ref, objective)
    if objective.entropy_coef != 0.0:
        if entropy is None:
            raise ValueError(
                f"objective.entropy_coef is {objective.entropy_coef} but entropy is missing"
            )
        loss = loss - objective.entropy_coef * entropy
    return loss


def kl_estimates(logprobs: Tensor, logprobs_ref: Tensor, objective: PolicyObjective) -> Tensor:
    """KL(policy || reference) of each token, [T], estimated from the sampled token alone."""
    gap = (logprobs_ref - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    kinds = {"k1": -gap, "k2": 0.5 * gap.square(), "k3": gap.exp() - gap - 1.0}
    return kinds[objective.kl_kind]


def _check_seqlens(cu_seqlens: Tensor, num_tokens: int) -> None:
    edges = cu_seqlens.tolist()
    if not edges or edges[0] != 0 or edges[-1] != num_tokens or edges != sorted(edges):
        raise ValueError(f"cu_seqlens must rise from 0 to T = {num_tokens}, got {edges}")
