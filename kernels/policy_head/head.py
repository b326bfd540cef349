"""The policy head: from hidden states to the loss and its gradient, without stored logits.

`policy_head_loss` computes the gradient in the forward pass. A block of tokens takes three products
(logits, d_hidden, d_weight) and two row passes; no tensor of size tokens x vocabulary is stored.
`token_logprobs` is the same head for other objectives; it recomputes the logits in its backward
pass. Both share tiling, row passes and bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megadapo.algorithm.objective import PolicyObjective
from megadapo.algorithm.reference import policy_loss
from megadapo.kernels.policy_head.blocks import logprob_blocks, logprob_grad_blocks, policy_blocks
from megadapo.kernels.policy_head.terms import CLIPPED_HIGH, CLIPPED_LOW, DROPPED, DUAL_CLIPPED
from megadapo.kernels.policy_head.tiles import PolicyInputs, RowOutputs
from megadapo.kernels.policy_head.tiling import HeadCall, HeadOptions, plan_call


@dataclass(frozen=True, kw_only=True)
class PolicyHeadOutput:
    """The loss of one micro-batch and the sums behind its metrics.

    Sums and counts are 0-d float64 tensors over the tokens with a loss weight that were not
    dropped: add them over micro-batches and data-parallel ranks, then divide. They are equal on
    all tensor-parallel ranks. Only `loss` has a gradient.
    """

    loss: Tensor
    """sum_t loss_weights[t] * l_t, fp32, 0-d."""
    logprobs: Tensor
    """[T] fp32, 0 where the loss weight is 0."""
    entropy: Tensor
    """[T] fp32 in nats, 0 where the loss weight is 0."""
    ratio: Tensor
    """[T] fp32 of the policies, 0 for a token that enters no sum."""
    distance: Tensor
    """[T] fp32, ||onehot(token) - p||, 0 where the loss weight is 0: the norm of the log-prob's
    derivative in the logits, divided by the temperature."""
    d_policy: Tensor
    """[T] fp32, derivative of loss_weights[t] * l_t in the log-prob without the KL divergence: 0
    for a clipped token, the rest of a truncated one."""
    ratio_max_error: Tensor
    """max |ratio - 1|, 0-d fp32; combine with max, not with a sum."""
    num_tokens: Tensor
    num_dropped: Tensor
    """Tokens left out because one of their log-probs or importance weights was not finite."""
    ratio_sum: Tensor
    clip_low_count: Tensor
    clip_high_count: Tensor
    dual_clip_count: Tensor
    entropy_sum: Tensor
    probability_sum: Tensor
    clip_high_probability_sum: Tensor
    """Sum of the probabilities of the tokens in clip_high_count."""
    clip_high_probability_max: Tensor
    """Their largest probability, 0-d fp32, 0 without any; combine with max."""


class TokenLogprobs(NamedTuple):
    """Results of the head for each token, each [T] fp32."""

    logprobs: Tensor
    entropy: Tensor  # in nats
    distance: Tensor
    """||onehot(token) - p||, without a gradient."""


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, **options: Unpack[HeadOptions]
) -> TokenLogprobs:
    """Return log-probs and entropy, differentiable in hidden and weight, and distances.

    Tokens outside `rows` are not computed and get 0. Pass the rows of the update here: old
    log-probs then come from the shapes of the update, and the first ratio is exactly 1. Arguments
    are those of `policy_head_loss`.
    """
    call = plan_call(hidden, weight, targets, options)
    return TokenLogprobs(*map(call.spread, _token_logprobs(hidden.contiguous(), weight, call)))


def policy_head_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    logprobs_old: Tensor,
    advantages: Tensor,
    loss_weights: Tensor,
    objective: PolicyObjective,
    logprobs_ref: Tensor | None = None,
    importance_weights: Tensor | None = None,
    penalties: Tensor | None = None,
    **options: Unpack[HeadOptions],
) -> PolicyHeadOutput:
    """Return sum_t loss_weights[t] * l_t with its gradient in hidden and weight, and metrics.

    Log-probs, entropy and loss have the same bits for TP 1, 2, 4 and 8, given the same padded
    vocabulary, if it can be cut into 8 shards of at least 64 rows (see `tp_invariant`).

    Args:
        hidden: [T, H], equal on every tensor-parallel rank, or this rank's [T/p, H] with
            `sequence_parallel`. Its gradient comes out summed over the group.
        weight: [V/p, H], this rank's rows of the output layer in hidden's dtype. Its gradient is
            accumulated in fp32, into `weight.main_grad` if the parameter has one.
        targets: [T] token ids over the whole vocabulary.
        logprobs_old: [T], for a sequence ratio those of `importance.sequence_log_ratios`. A token
            whose log-probs or importance weight are not finite is dropped and counted.
        loss_weights: [T]; tokens with weight 0 do not enter the head at all.
        logprobs_ref: [T] of the reference policy, required for a KL divergence in the loss.
        importance_weights: [T] factor on each token's policy term.
        penalties: [T] coefficients of |log-prob - old log-prob| in it, of gate "kl_cov".

    Raises:
        ValueError: shapes, dtypes, devices or targets do not fit, or an input is not finite.
    """
    if objective.kl_loss_coef != 0.0 and logprobs_ref is None:
        raise ValueError(f"objective.kl_coef is {objective.kl_coef} but logprobs_ref is missing")
    inputs = PolicyInputs(
        logprobs_old=logprobs_old,
        advantages=advantages,
        loss_weights=loss_weights,
        logprobs_ref=logprobs_ref,
        importance_weights=importance_weights,
        penalties=penalties,
    )
    call = plan_call(hidden, weight, targets, options, inputs)
    inputs = inputs.map(call.take)
    arguments = call, inputs, objective, torch.is_grad_enabled()
    loss, *rows = _policy_head(hidden.contiguous(), weight, *arguments)
    return _head_output(loss, RowOutputs(*rows), call, inputs)


def token_logprobs_definition(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Define `token_logprobs`: all logits at once, autograd, any precision, one rank."""
    logits = hidden @ weight[:vocab_size].t() / temperature
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, targets[:, None])[:, 0], entropy


def policy_head_loss_definition(
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
    penalties: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Define the loss of `policy_head_loss`, 0-d; old log-probs are those of tokens.

    Args:
        cu_seqlens: [S + 1] integers, start of each sequence, and T; None: one sequence.
    """
    chosen = loss_weights != 0
    ends = torch.tensor([0, len(chosen)]) if cu_seqlens is None else cu_seqlens
    chosen_before = torch.cat([chosen.new_zeros(1).long(), chosen.cumsum(0)])
    logprobs, entropy = token_logprobs_definition(
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
        penalties=None if penalties is None else penalties[chosen],
    )


class _PolicyHeadFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        call: HeadCall,
        inputs: PolicyInputs,
        objective: PolicyObjective,
        needs_grad: bool,
    ) -> tuple[Tensor, ...]:
        wants_hidden, wants_weight = (needs_grad and need for need in ctx.needs_input_grad[:2])
        into = getattr(weight, "main_grad", None) if call.accumulate_in_forward else None
        outputs, d_hidden, d_weight = policy_blocks(
            hidden,
            weight,
            call,
            inputs,
            objective,
            wants_hidden=wants_hidden,
            wants_weight=wants_weight,
            into=into,
        )
        if wants_hidden or wants_weight:
            ctx.grads = (d_hidden, d_weight)
            ctx.weight = weight
            ctx.is_accumulated = wants_weight and into is not None
        weighted = inputs.loss_weights.double() * outputs.loss.double()
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
            return None, None, None, None, None, None
        if ctx.is_accumulated:
            # on a device the process ends later, with this message: no pass waits for the check
            torch._assert_async(
                d_loss == 1.0, "accumulate_in_forward needs a backward pass with gradient 1"
            )
            return d_hidden, _returned_grad(ctx.weight, d_weight), None, None, None, None
        # on a device, reading the scale would be a sync
        is_one = d_loss.device.type == "cpu" and d_loss.item() == 1.0
        if d_hidden is not None and not is_one:
            d_hidden.mul_(d_loss)
        if d_weight is not None:
            # the scale takes no pass of its own over d_weight
            main_grad = getattr(ctx.weight, "main_grad", None)
            if main_grad is not None and is_one:
                main_grad.add_(d_weight)
            elif main_grad is not None:
                main_grad.addcmul_(d_weight, d_loss)
            elif not is_one:
                d_weight = torch.mul(d_weight, d_loss, out=torch.empty_like(ctx.weight))
            d_weight = _returned_grad(ctx.weight, d_weight)
        return d_hidden, d_weight, None, None, None, None


_policy_head: Callable[..., tuple[Tensor, ...]] = _PolicyHeadFunction.apply


class _TokenLogprobsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, call: HeadCall) -> tuple[Tensor, ...]:
        outputs, stats = logprob_blocks(hidden, weight, call)
        ctx.save_for_backward(hidden, weight, stats)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(outputs[2])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None, _: None
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
        return d_hidden, None if d_weight is None else _returned_grad(weight, d_weight), None


_token_logprobs: Callable[[Tensor, Tensor, HeadCall], tuple[Tensor, ...]] = (
    _TokenLogprobsFunction.apply
)


def _returned_grad(weight: Tensor, d_weight: Tensor) -> Tensor | None:
    """Return what autograd gets: the gradient, or a stand-in if main_grad already holds it.

    Megatron's hook runs on the backward thread only if autograd gets some gradient. Its content is
    not read, unless the parameter sets `zero_out_wgrad`: the gradient of a tied embedding is added
    to it.
    """
    if getattr(weight, "main_grad", None) is None:
        return d_weight.to(weight.dtype)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)


def _head_output(
    loss: Tensor, rows: RowOutputs, call: HeadCall, inputs: PolicyInputs
) -> PolicyHeadOutput:
    """Reduce the rows' values in float64."""
    weighted = inputs.loss_weights != 0
    kept = weighted & (rows.flags < DROPPED)

    def total(values: Tensor) -> Tensor:
        return torch.where(kept, values.double(), 0.0).sum()

    def count(bit: int) -> Tensor:
        return total((rows.flags & bit) != 0)

    def largest(values: Tensor) -> Tensor:
        return values.amax() if call.num_rows else values.sum()

    is_clipped_high = kept & ((rows.flags & CLIPPED_HIGH) != 0)
    clipped_high = torch.where(is_clipped_high, rows.logprobs.exp(), 0.0)
    return PolicyHeadOutput(
        loss=loss,
        logprobs=call.spread(rows.logprobs),
        entropy=call.spread(rows.entropy),
        ratio=call.spread(torch.where(weighted, rows.ratio, 0.0)),
        distance=call.spread(rows.distance),
        d_policy=call.spread(inputs.loss_weights * rows.d_policy),
        ratio_max_error=largest(torch.where(kept, (rows.ratio - 1.0).abs(), 0.0)),
        num_tokens=kept.sum().double(),
        num_dropped=(weighted & ~kept).sum().double(),
        ratio_sum=total(rows.ratio),
        clip_low_count=count(CLIPPED_LOW),
        clip_high_count=count(CLIPPED_HIGH),
        dual_clip_count=count(DUAL_CLIPPED),
        entropy_sum=total(rows.entropy),
        probability_sum=total(rows.logprobs.exp()),
        clip_high_probability_sum=total(clipped_high),
        clip_high_probability_max=largest(clipped_high),
    )
