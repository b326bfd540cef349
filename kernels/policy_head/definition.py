"""The policy head by the book: all logits at once, autograd, any precision."""

from __future__ import annotations

import torch
from torch import Tensor

from megadapo.algorithm.objective import PolicyObjective
from megadapo.algorithm.reference import policy_loss


def token_logprobs_ref(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy, each [T], of the whole vocabulary on one rank."""
    logits = hidden @ weight[:vocab_size].t() / temperature
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, targets[:, None])[:, 0], entropy


def policy_head_loss_ref(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    logprobs_old: Tensor,
    advantages: Tensor,
    loss_weights: Tensor,
    objective: PolicyObjective,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    logprobs_ref: Tensor | None = None,
    importance_weights: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The loss of `policy_head_loss`, 0-d; for a sequence ratio from the old log-probs themselves.

    `cu_seqlens`: [S + 1] integers, where each sequence begins, and T; None: one sequence.
    """
    chosen = loss_weights != 0
    ends = torch.tensor([0, len(chosen)]) if cu_seqlens is None else cu_seqlens
    chosen_before = torch.cat([chosen.new_zeros(1).long(), chosen.cumsum(0)])
    logprobs, entropy = token_logprobs_ref(
        hidden[chosen], weight, targets[chosen], temperature=temperature, vocab_size=vocab_size
    )
    return policy_loss(
        logprobs,
        logprobs_old[chosen],
        advantages[chosen],
        loss_weights[chosen],
        chosen_before[ends],
        objective=objective,
        logprobs_ref=None if logprobs_ref is None else logprobs_ref[chosen],
        entropy=entropy,
        importance_weights=None if importance_weights is None else importance_weights[chosen],
    )
