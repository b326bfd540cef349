"""The policy head: from hidden states to the loss and gradient without the logits.

`policy_head_loss` closes the gradient inside the forward pass: per block of tokens a logits
product, two row passes and the d_hidden and d_weight products, three in all, and nothing of size
tokens x vocabulary is ever stored. `token_logprobs` is the same head for any other objective; it
recomputes the logits in its backward pass. Both share plan, row passes and bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megadapo.algorithm.objective import PolicyObjective
from megadapo.kernels.policy_head.blocks import (
    PolicyCall,
    logprob_blocks,
    logprob_grad_blocks,
    policy_blocks,
)
from megadapo.kernels.policy_head.main_grad import (
    hand_over,
    is_known_one,
    main_grad_of,
    stand_in,
)
from megadapo.kernels.policy_head.output import PolicyHeadOutput, head_output
from megadapo.kernels.policy_head.tiles import PolicyInputs, RowOutputs
from megadapo.kernels.policy_head.tiling import HeadCall, HeadOptions, plan_call

__all__ = ["PolicyHeadOutput", "policy_head_loss", "token_logprobs"]


class _PolicyHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, call: PolicyCall, needs_grad: bool
    ) -> tuple[Tensor, ...]:
        wants_hidden, wants_weight = (needs_grad and need for need in ctx.needs_input_grad[:2])
        outputs, d_hidden, d_weight = policy_blocks(
            hidden, weight, call, wants_hidden=wants_hidden, wants_weight=wants_weight
        )
        if wants_hidden or wants_weight:
            ctx.grads = (d_hidden, d_weight)
            ctx.weight = weight
        weighted = call.inputs.loss_weights.double() * outputs.loss.double()
        loss = weighted.sum().float()
        rest = tuple(vars(outputs).values())
        ctx.mark_non_differentiable(*rest)
        ctx.set_materialize_grads(False)
        return loss, *rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError(
                "policy_head_loss keeps its gradient once: backward was called a second time"
            )
        (d_hidden, d_weight), ctx.grads = ctx.grads, None
        if d_loss is None:
            return None, None, None, None
        if d_hidden is not None and not is_known_one(d_loss):
            d_hidden.mul_(d_loss)
        if d_weight is not None:
            d_weight = hand_over(ctx.weight, d_weight, d_loss)
        return d_hidden, d_weight, None, None


_policy_head: Callable[[Tensor, Tensor, PolicyCall, bool], tuple[Tensor, ...]] = _PolicyHead.apply


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, call: HeadCall) -> tuple[Tensor, Tensor]:
        logprobs, entropy, stats = logprob_blocks(hidden, weight, call)
        ctx.save_for_backward(hidden, weight, stats)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight, stats = ctx.saved_tensors
        if d_logprobs is None:
            if d_entropy is None:
                return None, None, None
            d_logprobs = torch.zeros_like(d_entropy)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        d_hidden, d_weight = logprob_grad_blocks(
            hidden,
            weight,
            stats,
            d_logprobs.contiguous(),
            None if d_entropy is None else d_entropy.contiguous(),
            ctx.call,
            wants_hidden=wants_hidden,
            wants_weight=wants_weight,
        )
        if d_weight is not None:
            is_accumulated = main_grad_of(weight) is not None
            d_weight = stand_in(weight) if is_accumulated else d_weight.to(weight.dtype)
        return d_hidden, d_weight, None


_token_logprobs: Callable[[Tensor, Tensor, HeadCall], tuple[Tensor, Tensor]] = _TokenLogprobs.apply


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    process_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    chunk_tokens: int | None = None,
    rows: Tensor | None = None,
    sequence_parallel: bool = False,
    check_inputs: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return (log-probs [T], entropy [T]) in fp32, differentiable in hidden and weight.

    Tokens outside `rows` are not computed and get 0. Pass the rows of the update here, so that
    old log-probs come from the very shapes of the update and the first ratio is exactly 1. The
    arguments are those of `policy_head_loss`.
    """
    options = HeadOptions(
        temperature=temperature,
        process_group=process_group,
        vocab_size=vocab_size,
        chunk_tokens=chunk_tokens,
        rows=rows,
        sequence_parallel=sequence_parallel,
        check_inputs=check_inputs,
    )
    call = plan_call(hidden, weight, targets, options)
    logprobs, entropy = _token_logprobs(hidden.contiguous(), weight, call)
    return call.spread(logprobs), call.spread(entropy)


def policy_head_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    logprobs_old: Tensor,
    advantages: Tensor,
    loss_weights: Tensor,
    objective: PolicyObjective,
    temperature: float = 1.0,
    process_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    chunk_tokens: int | None = None,
    logprobs_ref: Tensor | None = None,
    importance_weights: Tensor | None = None,
    rows: Tensor | None = None,
    sequence_parallel: bool = False,
    check_inputs: bool = True,
) -> PolicyHeadOutput:
    """Return sum_t loss_weights[t] * l_t with its gradient in hidden and weight, and metrics.

    Log-probs, entropy and loss have the same bits for TP 1, 2, 4 and 8, given the same padded
    vocabulary, wherever that can be cut in 8 shards of at least 64 rows.

    Args:
        hidden: [T, H], equal on every tensor-parallel rank, or this rank's [T/p, H] with
            `sequence_parallel`. Its gradient comes out summed over the group.
        weight: [V/p, H], this rank's rows of the output layer in hidden's dtype. Its gradient is
            accumulated in fp32, into `weight.main_grad` where the parameter has one.
        targets: [T] token ids over the whole vocabulary.
        logprobs_old: [T], for a sequence ratio those of `algorithm.ratios.sequence_shifted`. A
            token whose value is not finite is dropped and counted, as is one whose importance
            weight or reference log-prob is not.
        advantages: [T].
        loss_weights: [T]; tokens with weight 0 do not enter the head at all.
        objective: ratio, gate and the optional terms.
        temperature: logits are divided by it.
        process_group: the tensor-parallel one; None for a single rank.
        vocab_size: true vocabulary size; later rows of weight are padding and get no gradient.
        chunk_tokens: tokens per block; by default as many as fit the buffers.
        logprobs_ref: [T] of the reference policy, needed with a KL divergence in the loss.
        importance_weights: [T] factor on each token's policy term, such as a truncated
            trainer/engine importance weight.
        rows: [R] indices of the tokens to compute, ascending, when the caller has them; at least
            those with a loss weight.
        sequence_parallel: hidden is cut along the sequence over the process group.
        check_inputs: False skips the checks of values, which wait for the device once.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; targets outside the vocabulary;
            advantages or loss weights that are not finite.
    """
    if objective.kl_loss_coef != 0.0 and logprobs_ref is None:
        raise ValueError(f"objective.kl_coef is {objective.kl_coef} but logprobs_ref is missing")
    options = HeadOptions(
        temperature=temperature,
        process_group=process_group,
        vocab_size=vocab_size,
        chunk_tokens=chunk_tokens,
        rows=rows,
        sequence_parallel=sequence_parallel,
        check_inputs=check_inputs,
    )
    inputs = PolicyInputs(
        logprobs_old=logprobs_old,
        advantages=advantages,
        loss_weights=loss_weights,
        logprobs_ref=logprobs_ref,
        importance_weights=importance_weights,
    )
    call = plan_call(hidden, weight, targets, options, inputs)
    policy = PolicyCall(head=call, inputs=inputs.map(call.take), objective=objective)
    loss, *values = _policy_head(hidden.contiguous(), weight, policy, torch.is_grad_enabled())
    outputs = RowOutputs(**dict(zip(RowOutputs.__dataclass_fields__, values, strict=True)))
    return head_output(loss, outputs, policy)
