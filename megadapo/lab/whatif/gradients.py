"""Losses and gradients of several objectives on one rank of the trainer.

Each objective has the micro-batches, the head and the optimizer's norm of an update, so the numbers
of the run's own objective have the bits of its update. With our own layers and one pipeline stage,
all objectives share one forward pass, whose graph is differentiated once for each. Otherwise (other
layers free their activations) each objective has a pass of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megadapo.kernels.policy_head import PolicyHeadOutput
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.model.head import PolicyHead
from megadapo.trainer.model.megatron_internals import grads_of_norm
from megadapo.trainer.update.optimizer import finalize_sums
from megadapo.trainer.update.step import run_schedule

if TYPE_CHECKING:
    from megadapo.trainer.rank import TrainerRank

Work = Sequence[tuple[MicroBatch, PolicyHead]]
"""All micro-batches of a batch with the head of one objective."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Gradient:
    """This rank's part of a gradient, as the optimizer reads it for the norm."""

    parts: list[list[Tensor]]
    """Tensors of each of megatron-core's optimizers, without copies of other ranks' parameters."""
    norm: float
    """Norm of the whole gradient: the number that an update reports."""


@dataclass(frozen=True)
class _CapturedInputs:
    """Arguments of the policy head, in the form that the schedule returns."""

    loss: Tensor
    inputs: dict[str, Any]


def differentiate(
    rank: TrainerRank, works: Sequence[Work]
) -> tuple[list[list[PolicyHeadOutput]], list[Gradient]]:
    """Return each objective's outputs by micro-batch, and its gradient; collective.

    Args:
        works: of each objective; all have the same sequences in the same micro-batches.
    """
    if shares_forward(rank):
        return _with_one_forward(rank, works)
    outputs, gradients = [], []
    for work in works:
        for chunk in rank.chunks:
            chunk.zero_grad_buffer()
        outputs.append(run_schedule(rank.chunks, work, forward_only=False))
        gradients.append(_take(rank))
    return outputs, gradients


def shares_forward(rank: TrainerRank) -> bool:
    """Return whether the graph of a forward pass can be differentiated more than once."""
    config, (first, *others) = rank.config, rank.chunks
    has_own_layers = rank.device.type == "cpu" and config.num_moe_experts is None
    is_whole = config.pipeline_model_parallel_size == 1 and not others
    # buckets would be summed as soon as the first objective has filled them
    return has_own_layers and is_whole and not first.ddp_config.overlap_grad_reduce


def _with_one_forward(
    rank: TrainerRank, works: Sequence[Work]
) -> tuple[list[list[PolicyHeadOutput]], list[Gradient]]:
    (chunk,) = rank.chunks
    chunk.zero_grad_buffer()
    buffers = [one.grad_data for one in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    sums = [[torch.zeros_like(buffer) for buffer in buffers] for _ in works]
    outputs: list[list[PolicyHeadOutput]] = [[] for _ in works]
    for pieces in zip(*works, strict=True):
        (kept,) = run_schedule(rank.chunks, [(pieces[0][0], _keep_inputs)], forward_only=True)
        for number, (micro_batch, head) in enumerate(pieces):
            # continue from this objective's sums: additions then have the order of an update
            _copy(sums[number], buffers)
            output = head(**kept.inputs, context=micro_batch)
            output.loss.backward(retain_graph=number < len(works) - 1)
            _copy(buffers, sums[number])
            outputs[number].append(replace(output, loss=output.loss.detach()))
    gradients = []
    for own in sums:
        _copy(own, buffers)
        finalize_sums(rank.chunks, None)
        gradients.append(_take(rank))
    return outputs, gradients


def _keep_inputs(*, context: MicroBatch, **inputs: Any) -> _CapturedInputs:
    """Keep the hidden states; an `output_processor` like the head."""
    return _CapturedInputs(torch.zeros(()), inputs)


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _take(rank: TrainerRank) -> Gradient:
    """Copy the gradient in the buffers, which are summed over ranks."""
    rank.optimizer.prepare_grads()
    return Gradient(
        parts=[
            []
            if part.is_stub_optimizer
            else [grad.detach().clone() for grad in grads_of_norm(part)]
            for part in rank.optimizer.chained_optimizers
        ],
        norm=float(rank.optimizer.get_grad_norm()),
    )


def dot(rank: TrainerRank, one: Gradient, other: Gradient) -> float:
    """Return the product of two gradients over all ranks, in float64; collective."""
    total = 0.0
    parts = zip(rank.optimizer.chained_optimizers, one.parts, other.parts, strict=True)
    for optimizer, ours, theirs in parts:
        own = torch.zeros((), dtype=torch.float64, device=rank.device)
        for x, y in zip(ours, theirs, strict=True):
            own += x.flatten().double() @ y.flatten().double()
        torch.distributed.all_reduce(own, group=optimizer.get_grad_stats_parallel_group())
        total += own.item()
    return total
