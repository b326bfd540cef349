"""How much of the policy gradient is of tokens with a positive advantage."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megadapo.algorithm.objective import PolicyObjective
from megadapo.kernels.policy_head.terms import policy_terms
from megadapo.kernels.policy_head.tiles import PolicyInputs


def gradient_sizes(
    logprobs: Tensor, inputs: PolicyInputs, objective: PolicyObjective
) -> tuple[float, float]:
    """Sum of |loss weight x derivative in the log-prob| where the advantage is positive, and in
    all.

    Of the policy term alone, behind its gate: a clipped token has none, a truncated one what is
    left of it. The KL divergence and the entropy bonus pull at every token and have no part in it.

    Args:
        logprobs: [R] of the update.
        inputs: [R] of the same tokens; with a sequence ratio the old log-probs are shifted.
        objective: as the update has it, with the clip bounds that were searched for it.
    """
    without_reference = replace(inputs, logprobs_ref=None)
    terms = policy_terms(logprobs, torch.zeros_like(logprobs), without_reference, objective)
    sizes = (inputs.loss_weights * terms.d_logprobs).abs().to(torch.float64)
    positive = torch.where(inputs.advantages > 0, sizes, 0.0)
    together: list[float] = torch.stack((positive.sum(), sizes.sum())).tolist()
    return together[0], together[1]
