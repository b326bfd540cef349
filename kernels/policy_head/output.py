"""What the policy head returns: the loss, and sums that add up over micro-batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megadapo.kernels.policy_head.blocks import PolicyCall
from megadapo.kernels.policy_head.terms import CLIPPED_HIGH, CLIPPED_LOW, DROPPED, DUAL_CLIPPED
from megadapo.kernels.policy_head.tiles import RowOutputs


@dataclass(frozen=True, kw_only=True)
class PolicyHeadOutput:
    """The loss of one micro-batch and what the metrics need of it.

    Sums and counts are 0-d float64 tensors over the tokens with a loss weight that were not
    dropped: add them over micro-batches and data-parallel ranks, then divide. They are equal on
    all tensor-parallel ranks. Only `loss` carries a gradient.
    """

    loss: Tensor
    """sum_t loss_weights[t] * l_t, fp32, 0-d."""
    logprobs: Tensor
    """[T] fp32, 0 where the loss weight is 0."""
    entropy: Tensor
    """[T] fp32 in nats, 0 where the loss weight is 0."""
    ratio_max_error: Tensor
    """max |ratio - 1|, 0-d fp32: combine with max, not with a sum."""
    num_tokens: Tensor
    num_dropped: Tensor
    """Tokens left out because a log-prob or importance weight of theirs was not finite."""
    ratio_sum: Tensor
    clip_low_count: Tensor
    clip_high_count: Tensor
    dual_clip_count: Tensor
    entropy_sum: Tensor
    probability_sum: Tensor
    kl_sum: Tensor


def head_output(loss: Tensor, rows: RowOutputs, policy: PolicyCall) -> PolicyHeadOutput:
    """Reduce the rows' values once, in float64."""
    call = policy.head
    weighted = policy.inputs.loss_weights != 0
    kept = weighted & (rows.flags < DROPPED)

    def total(values: Tensor) -> Tensor:
        return torch.where(kept, values.double(), 0.0).sum()

    def count(bit: int) -> Tensor:
        return total((rows.flags & bit) != 0)

    error = torch.where(kept, (rows.ratio - 1.0).abs(), 0.0)
    return PolicyHeadOutput(
        loss=loss,
        logprobs=call.spread(rows.logprobs),
        entropy=call.spread(rows.entropy),
        ratio_max_error=error.amax() if call.num_rows else error.sum(),
        num_tokens=kept.sum().double(),
        num_dropped=(weighted & ~kept).sum().double(),
        ratio_sum=total(rows.ratio),
        clip_low_count=count(CLIPPED_LOW),
        clip_high_count=count(CLIPPED_HIGH),
        dual_clip_count=count(DUAL_CLIPPED),
        entropy_sum=total(rows.entropy),
        probability_sum=total(rows.logprobs.exp()),
        kl_sum=total(rows.kl),
    )
