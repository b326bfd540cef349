"""The policy head: from hidden states to DAPO's loss and gradient without the logits.

`policy_head_loss` closes the gradient inside the forward pass: per block of tokens a logits
product, two row passes and the d_hidden and d_weight products, three in all, and nothing of size
tokens x vocabulary is ever stored. `token_logprobs` is the same head for any other objective; it
recomputes the logits in its backward pass. Both share plan, row passes and bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megadapo.algorithm.objective import PolicyObjective
from megadapo.kernels.policy_head_blocks import (
    HeadCall,
    PolicyCall,
    logits_by_tile,
    logprob_grad_blocks,
    policy_blocks,
)
from megadapo.kernels.policy_head_exchange import (
    gather_stats,
    process_group_size,
)
from megadapo.kernels.policy_head_main_grad import hand_over, is_known_one, main_grad_of
from megadapo.kernels.policy_head_plan import (
    check_operands,
    check_temperature,
    check_token_tensor,
    plan_shards,
    plan_tiling,
    select_rows,
)
from megadapo.kernels.policy_head_rows import (
    logprob_rows,
    row_stats,
)
from megadapo.kernels.policy_head_terms import (
    CLIPPED_HIGH,
    CLIPPED_LOW,
    DROPPED,
    DUAL_CLIPPED,
    policy_loss_ref,
)
from megadapo.kernels.policy_head_types import PolicyInputs, RowOutputs


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

    def mean(self, name: str) -> Tensor:
        """One of the sums or counts over `num_tokens`; 0 when there are none."""
        return getattr(self, name) / self.num_tokens.clamp(min=1)

    @property
    def ratio_mean(self) -> Tensor:
        return self.mean("ratio_sum")

    @property
    def clip_low_fraction(self) -> Tensor:
        return self.mean("clip_low_count")

    @property
    def clip_high_fraction(self) -> Tensor:
        return self.mean("clip_high_count")

    @property
    def dual_clip_fraction(self) -> Tensor:
        return self.mean("dual_clip_count")

    @property
    def entropy_mean(self) -> Tensor:
        return self.mean("entropy_sum")

    @property
    def probability_mean(self) -> Tensor:
        return self.mean("probability_sum")

    @property
    def kl_mean(self) -> Tensor:
        return self.mean("kl_sum")


def token_logprobs_ref(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy [T] by the book: all logits at once, any precision, autograd."""
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
) -> Tensor:
    """The loss of `policy_head_loss` by the book; finite inputs only."""
    chosen = loss_weights != 0
    logprobs, entropy = token_logprobs_ref(
        hidden[chosen],
        weight,
        targets[chosen],
        temperature=temperature,
        vocab_size=vocab_size,
    )
    losses = policy_loss_ref(
        logprobs,
        entropy,
        logprobs_old=logprobs_old[chosen],
        advantages=advantages[chosen],
        objective=objective,
        logprobs_ref=None if logprobs_ref is None else logprobs_ref[chosen],
        importance_weights=None if importance_weights is None else importance_weights[chosen],
    )
    return (loss_weights[chosen] * losses).sum()


class _PolicyHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, call, needs_grad):  # noqa: ANN001, ANN205
        wants_hidden, wants_weight = (needs_grad and need for need in ctx.needs_input_grad[:2])
        outputs, d_hidden, d_weight = policy_blocks(
            hidden, weight, call, wants_hidden=wants_hidden, wants_weight=wants_weight
        )
        if wants_hidden or wants_weight:
            ctx.grads = (d_hidden, d_weight)
            ctx.weight = weight
            ctx.is_accumulated = call.accumulate_in_forward
        weighted = call.inputs.loss_weights.double() * outputs.loss.double()
        loss = weighted.sum().float()
        rest = tuple(vars(outputs).values())
        ctx.mark_non_differentiable(*rest)
        ctx.set_materialize_grads(False)
        return loss, *rest

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss, *_):  # noqa: ANN001, ANN205
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
            d_weight = hand_over(ctx.weight, d_weight, d_loss, ctx.is_accumulated)
        return d_hidden, d_weight, None, None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, call):  # noqa: ANN001, ANN205
        values = torch.zeros(2, call.num_rows, dtype=torch.float32, device=hidden.device)
        stats = torch.empty(
            call.shards.num_total, 4, call.num_rows, dtype=torch.float32, device=hidden.device
        )
        for start, stop, logits in logits_by_tile(hidden, weight, call):
            targets = call.targets[start:stop]
            local = row_stats(
                logits,
                targets,
                shards=call.shards,
                temperature=call.temperature,
            )
            merged = gather_stats(local, call.process_group)
            stats[:, :, start:stop] = merged
            logprob_rows(
                logits,
                targets,
                merged,
                logprobs=values[0, start:stop],
                entropy=values[1, start:stop],
                shards=call.shards,
                temperature=call.temperature,
            )
        ctx.save_for_backward(hidden, weight, stats)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return values[0], values[1]

    @staticmethod
    @once_differentiable
    def backward(ctx, d_logprobs, d_entropy):  # noqa: ANN001, ANN205
        if d_logprobs is None and d_entropy is None:
            return None, None, None
        hidden, weight, stats = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        call = ctx.call
        if d_logprobs is None:
            d_logprobs = torch.zeros_like(d_entropy)
        d_hidden, d_weight = logprob_grad_blocks(
            hidden,
            weight,
            stats,
            d_logprobs.contiguous(),
            None if d_entropy is None else d_entropy.contiguous(),
            call,
            wants_hidden=wants_hidden,
            wants_weight=wants_weight,
        )
        if d_weight is not None:
            is_accumulated = main_grad_of(weight) is not None
            one = torch.ones((), device=hidden.device)
            d_weight = hand_over(weight, d_weight, one, is_accumulated)
        return d_hidden, d_weight, None


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    process_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    chunk_tokens: int | None = None,
    loss_mask: Tensor | None = None,
    rows: Tensor | None = None,
    tp_invariant: bool | None = None,
    sequence_parallel: bool = False,
    check_inputs: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return (log-probs [T], entropy [T]) in fp32, differentiable in hidden and weight.

    `loss_mask` [T]: tokens where it is 0 are not computed and get 0. Pass the loss weights of
    the update here, so that old log-probs come from the very shapes of the update and the first
    ratio is exactly 1. The other arguments are those of `policy_head_loss`.
    """
    call = _plan(
        hidden,
        weight,
        targets,
        mask=loss_mask,
        finite={},
        temperature=temperature,
        process_group=process_group,
        vocab_size=vocab_size,
        chunk_tokens=chunk_tokens,
        rows=rows,
        tp_invariant=tp_invariant,
        sequence_parallel=sequence_parallel,
        check_inputs=check_inputs,
    )
    logprobs, entropy = _TokenLogprobs.apply(hidden.contiguous(), weight, call)
    selection = call.selection
    return (
        selection.spread(logprobs, call.num_tokens),
        selection.spread(entropy, call.num_tokens),
    )


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
    tp_invariant: bool | None = None,
    sequence_parallel: bool = False,
    check_inputs: bool = True,
    accumulate_in_forward: bool = False,
) -> PolicyHeadOutput:
    """Return sum_t loss_weights[t] * l_t with its gradient in hidden and weight, and metrics.

    Args:
        hidden: [T, H], equal on every tensor-parallel rank, or this rank's [T/p, H] with
            `sequence_parallel`. Its gradient comes out summed over the group.
        weight: [V/p, H], this rank's rows of the output layer in hidden's dtype. Its gradient is
            accumulated in fp32, into `weight.main_grad` where the parameter has one.
        targets: [T] token ids over the whole vocabulary.
        logprobs_old: [T]. A token whose value is not finite is dropped and counted, as is one
            whose importance weight or reference log-prob is not.
        advantages: [T].
        loss_weights: [T]; tokens with weight 0 do not enter the head at all.
        objective: clip range and the optional terms.
        temperature: logits are divided by it.
        process_group: tensor-parallel process group; None for a single rank.
        vocab_size: true vocabulary size; later rows of weight are padding and get no gradient.
        chunk_tokens: tokens per block; by default as many as fit the buffers.
        logprobs_ref: [T] of the reference policy, needed when `objective.kl_coef` is not 0.
        importance_weights: [T] factor on each token's policy term, such as a truncated
            trainer/engine importance weight.
        rows: [R] indices of the tokens to compute, ascending, when the caller has them; at least
            those with a loss weight.
        tp_invariant: True makes log-probs, entropy and loss the same bits for TP 1, 2, 4 and 8,
            given the same padded vocabulary; None does so wherever that can be cut in 8 shards
            of at least 64 rows.
        check_inputs: False skips the checks of values, which wait for the device once.
        accumulate_in_forward: write the weight's gradient into main_grad in the forward pass,
            which saves a buffer of its size; the loss must then not be scaled afterwards.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; targets outside the vocabulary;
            advantages or loss weights that are not finite.
    """
    per_token = {"advantages": advantages, "loss_weights": loss_weights}
    others = {
        "logprobs_old": logprobs_old,
        "logprobs_ref": logprobs_ref,
        "importance_weights": importance_weights,
    }
    if objective.kl_coef != 0.0 and logprobs_ref is None:
        raise ValueError(f"objective.kl_coef is {objective.kl_coef} but logprobs_ref is missing")
    call = _plan(
        hidden,
        weight,
        targets,
        mask=loss_weights,
        finite=per_token,
        others=others,
        temperature=temperature,
        process_group=process_group,
        vocab_size=vocab_size,
        chunk_tokens=chunk_tokens,
        rows=rows,
        tp_invariant=tp_invariant,
        sequence_parallel=sequence_parallel,
        check_inputs=check_inputs,
    )
    taken = {
        name: None if value is None else call.selection.take(value).float().contiguous()
        for name, value in (per_token | others).items()
    }
    if accumulate_in_forward and main_grad_of(weight) is None:
        raise ValueError("accumulate_in_forward needs a weight with main_grad")
    policy = PolicyCall(
        head=call,
        inputs=PolicyInputs(**taken),
        objective=objective,
        accumulate_in_forward=accumulate_in_forward,
    )
    loss, *values = _PolicyHead.apply(hidden.contiguous(), weight, policy, torch.is_grad_enabled())
    outputs = RowOutputs(**dict(zip(RowOutputs.__dataclass_fields__, values, strict=True)))
    return _output(loss, outputs, policy)


def _plan(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None,
    finite: dict[str, Tensor],
    others: dict[str, Tensor | None] | None = None,
    temperature: float,
    process_group: dist.ProcessGroup | None,
    vocab_size: int | None,
    chunk_tokens: int | None,
    rows: Tensor | None,
    tp_invariant: bool | None,
    sequence_parallel: bool,
    check_inputs: bool,
) -> HeadCall:
    """Check the arguments and fix rows, blocks and shards; the same on every rank."""
    tp = process_group_size(process_group)
    num_tokens = check_operands(hidden, weight, targets, tp=tp, sequence_parallel=sequence_parallel)
    check_temperature(temperature)
    for name, value in (finite | (others or {}) | {"loss_mask": mask}).items():
        if value is not None:
            check_token_tensor(name, value, num_tokens, hidden.device)
    shards = plan_shards(weight, process_group, vocab_size, tp_invariant)
    selection = select_rows(
        mask,
        targets,
        vocab_size=shards.vocab_size,
        num_parts=tp if sequence_parallel else 1,
        finite=finite,
        rows=rows,
        check_inputs=check_inputs,
    )
    padded_vocab = shards.size * shards.num_total
    return HeadCall(
        targets=selection.take(targets).long().contiguous(),
        selection=selection,
        num_tokens=num_tokens,
        tiling=plan_tiling(padded_vocab, hidden.dtype, hidden.device, chunk_tokens),
        shards=shards,
        temperature=float(temperature),
        process_group=process_group if tp > 1 else None,
        sequence_parallel=sequence_parallel,
    )


def _output(loss: Tensor, rows: RowOutputs, policy: PolicyCall) -> PolicyHeadOutput:
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
        logprobs=call.selection.spread(rows.logprobs, call.num_tokens),
        entropy=call.selection.spread(rows.entropy, call.num_tokens),
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
