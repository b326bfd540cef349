"""One mini-batch through megatron-core's pipeline schedule: log-probs, or loss and gradients.

Loss weights hold the whole reduction, so nothing here divides: losses and gradients are sums over
micro-batches and ranks, whatever the split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed import finalize_model_grads as finalize_sums_and_scale
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.profiler import record_function

from megadapo.algorithm.objective import PolicyObjective
from megadapo.cluster.watch.heartbeat import report_progress
from megadapo.kernels.policy_head import PolicyHeadOutput
from megadapo.kernels.policy_head.tiles import PolicyInputs
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.batch.off_policy import OldPolicy
from megadapo.trainer.model.head import HeadTask, PolicyHead, sequence_old
from megadapo.trainer.update.metrics import MiniBatchSums, gradient_sizes


def finalize_sums(chunks: list[DistributedDataParallel], num_tokens: Any, **groups: Any) -> None:
    """megatron-core's reduction of gradients over all groups, without its division by tokens."""
    finalize_sums_and_scale(chunks, None, **groups)


@record_function("megadapo::logprobs")
def compute_logprobs(
    chunks: list[DistributedDataParallel],
    head: PolicyHead,
    micro_batches: Sequence[MicroBatch],
    *,
    replays: bool = True,
) -> list[Tensor]:
    """Log-probs [T] of each micro-batch on the last pipeline stage; elsewhere an empty list.

    `replays`: Routers take over the experts of the micro-batches, where these have them.
    """
    tasks = [
        HeadTask(micro_batch=micro_batch, old=None, replays=replays)
        for micro_batch in micro_batches
    ]
    return run_schedule(chunks, head, tasks, forward_only=True)


@record_function("megadapo::gradients")
def compute_gradients(
    chunks: list[DistributedDataParallel],
    head: PolicyHead,
    micro_batches: Sequence[MicroBatch],
    old: Sequence[OldPolicy],
    texts: Sequence[MicroBatch] = (),
) -> tuple[MiniBatchSums, list[Tensor]]:
    """Leave the mini-batch's summed gradients in the buffers of the rank's chunks.

    Args:
        old: what each micro-batch is held against; empty except on the last pipeline stage.
        texts: further micro-batches of it, whose loss is that of a language model.

    Returns:
        This rank's sums and the log-probs [T] of each micro-batch; zeros and an empty list except
        on the last pipeline stage.
    """
    nothing = OldPolicy(proximal=torch.empty(0), logprobs=torch.empty(0))
    tasks = [
        HeadTask(micro_batch=micro_batch, old=policy)
        for micro_batch, policy in zip(
            micro_batches, old or [nothing] * len(micro_batches), strict=True
        )
    ]
    text_tasks = [_text_task(micro_batch) for micro_batch in texts]
    for chunk in chunks:
        chunk.zero_grad_buffer()
    outputs = run_schedule(chunks, head, [*tasks, *text_tasks], forward_only=False)
    of_texts = outputs[len(tasks) :]
    sums = MiniBatchSums()
    for task, output in zip(tasks, outputs, strict=False):
        _add(sums, task, output)
        _add_gradient_sizes(sums, task, output.logprobs, head.objective)
    for micro_batch, output in zip(texts, of_texts, strict=False):
        sums.num_text_tokens += len(micro_batch.rows)
        sums.text_loss -= output.logprobs[micro_batch.rows].sum(dtype=torch.float64).item()
    return sums, [output.logprobs for output in outputs[: len(tasks)]]


class Task(Protocol):
    """What a head does with one micro-batch."""

    @property
    def micro_batch(self) -> MicroBatch: ...


def run_schedule(
    chunks: list[DistributedDataParallel],
    head: Callable[..., Any],
    tasks: Sequence[Task],
    *,
    forward_only: bool,
) -> list[Any]:
    """What the head returned for each task, on the last stage; every rank has as many tasks.

    Args:
        head: the model's last step. It returns a tensor, or a dataclass's object with a `loss`.
    """
    forward_backward = get_forward_backward_func()
    outputs: list[Any] = forward_backward(
        forward_step_func=partial(_forward_step, head),
        # each chunk meets every micro-batch, in the same order
        data_iterator=[iter(tasks) for _ in chunks] if len(chunks) > 1 else iter(tasks),
        model=chunks,
        num_microbatches=len(tasks),
        # the true lengths travel with the activations (variable_seq_lengths)
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return outputs


def _forward_step(
    head: Callable[..., Any], tasks: Iterator[Task], chunk: DistributedDataParallel
) -> tuple[Any, Any]:
    task = next(tasks)
    output = chunk(
        input_ids=task.micro_batch.tokens,
        position_ids=None,
        attention_mask=None,
        packed_seq_params=task.micro_batch.packed,
        padding_mask=_uncounted(task) if chunk.config.num_moe_experts else None,
        output_processor=head,
        output_processor_context=task,
    )
    report_progress()
    return output, _loss_and_data


def _uncounted(task: Task) -> Tensor:
    """[1, T] bool: tokens that routers do not balance, which are padding and texts."""
    is_padding = task.micro_batch.is_padding[None, :]
    is_text = isinstance(task, HeadTask) and task.is_text
    return torch.ones_like(is_padding) if is_text else is_padding


def _loss_and_data(output: Any) -> tuple[Tensor, Tensor, Any]:
    """The schedule's (loss to differentiate, token count it may divide by, what to hand back)."""
    num_tokens = torch.zeros((), dtype=torch.int)
    if isinstance(output, Tensor):
        return output.sum(), num_tokens, output
    # with its graph it would keep what other stages sent until the whole mini-batch is done
    return output.loss, num_tokens, replace(output, loss=output.loss.detach())


def _text_task(micro_batch: MicroBatch) -> HeadTask:
    # nothing is divided by: where there is no ratio, old log-probs only have to be finite
    unread = torch.zeros_like(micro_batch.loss_weights)
    old = OldPolicy(proximal=unread, logprobs=unread)
    return HeadTask(micro_batch=micro_batch, old=old, is_text=True)


def _add(sums: MiniBatchSums, task: HeadTask, output: PolicyHeadOutput) -> None:
    # the head leaves out tokens whose log-probs are not finite; here only the model can be at
    # fault for that, and its gradient is not to be trusted
    sums.loss += math.nan if output.num_dropped.item() else output.loss.item()
    sums.num_tokens += output.num_tokens.item()
    sums.entropy += output.entropy_sum.item()
    sums.ratio += output.ratio_sum.item()
    sums.clipped_low += output.clip_low_count.item()
    sums.clipped_high += output.clip_high_count.item()
    sums.dual_clipped += output.dual_clip_count.item()
    sums.token_probability += output.probability_sum.item()
    micro_batch, old = task.micro_batch, task.old
    assert old is not None, "there is no loss without it"
    sums.logprob += output.logprobs[micro_batch.rows].sum(dtype=torch.float64).item()
    sums.max_ratio_error = max(sums.max_ratio_error, _ratio_error(micro_batch, old, output))
    difference = (old.proximal[micro_batch.rows] - micro_batch.logprobs_rollout).abs()
    fresh = difference[micro_batch.is_current]
    if len(fresh):
        sums.num_compared += len(fresh)
        sums.logprob_difference += fresh.sum(dtype=torch.float64).item()
        sums.max_logprob_difference = max(sums.max_logprob_difference, fresh.max().item())
    if micro_batch.num_stale:
        drift = difference[micro_batch.is_stale]
        sums.num_stale += micro_batch.num_stale
        sums.logprob_drift += drift.sum(dtype=torch.float64).item()
        sums.max_logprob_drift = max(sums.max_logprob_drift, drift.max().item())
    if old.kl is not None and len(old.kl):
        sums.num_with_kl += len(old.kl)
        sums.kl += old.kl.sum().item()
        sums.max_kl = max(sums.max_kl, old.kl.abs().max().item())
    sums.num_weighted += old.num_weighted
    sums.num_outside += old.num_outside


def _add_gradient_sizes(
    sums: MiniBatchSums, task: HeadTask, logprobs: Tensor, objective: PolicyObjective
) -> None:
    micro_batch, old = task.micro_batch, task.old
    assert old is not None, "there is no gradient without it"
    by_token = objective.ratio != "sequence"
    inputs = PolicyInputs(
        logprobs_old=old.logprobs if by_token else sequence_old(micro_batch, old, logprobs),
        advantages=micro_batch.advantages if old.advantages is None else old.advantages,
        loss_weights=micro_batch.loss_weights,
        logprobs_ref=None,
        importance_weights=old.importance_weights,
    ).map(lambda values: values[micro_batch.rows])
    positive, size = gradient_sizes(logprobs[micro_batch.rows], inputs, objective)
    sums.positive_gradient += positive
    sums.gradient += size


def _ratio_error(micro_batch: MicroBatch, old: OldPolicy, output: PolicyHeadOutput) -> float:
    """Largest |ratio - 1| over the tokens whose old log-prob the trainer computed itself."""
    if old.logprobs is old.proximal:
        return output.ratio_max_error.item()
    recomputed = micro_batch.rows[~micro_batch.is_stale]
    if not len(recomputed):
        return 0.0
    change = output.logprobs[recomputed] - old.logprobs[recomputed]
    return torch.expm1(change).abs().max().item()
