"""One mini-batch through megatron-core's pipeline schedule: log-probs, or loss and gradients.

Loss weights contain the whole reduction, so nothing is divided here: losses and gradients are sums
over micro-batches and ranks for every split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.profiler import record_function

from megadapo.cluster.watch.heartbeat import report_progress
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.batch.off_policy import OldPolicy
from megadapo.trainer.model.head import HeadTask, PolicyHead
from megadapo.trainer.update.metrics import MiniBatchSums


class Task(Protocol):
    """Work of a head on one micro-batch."""

    @property
    def micro_batch(self) -> MicroBatch: ...


@record_function("megadapo::logprobs")
def compute_logprobs(
    chunks: list[DistributedDataParallel],
    head: PolicyHead,
    micro_batches: Sequence[MicroBatch],
    *,
    replays: bool = True,
) -> list[Tensor]:
    """Return log-probs [T] of each micro-batch on the last pipeline stage, else an empty list.

    `replays`: whether routers use the experts in the micro-batches, if there are any.
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
    pretraining: Sequence[MicroBatch] = (),
) -> tuple[MiniBatchSums, list[Tensor]]:
    """Leave the mini-batch's summed gradients in the buffers of the rank's chunks.

    Args:
        old: old policy of each micro-batch; empty except on the last pipeline stage.
        pretraining: further micro-batches, with the loss of a language model.

    Returns:
        This rank's sums and the log-probs [T] of each micro-batch; zeros and an empty list except
        on the last pipeline stage.
    """
    policies: Sequence[OldPolicy | None] = old or [None] * len(micro_batches)
    tasks = [
        HeadTask(micro_batch=micro_batch, old=policy)
        for micro_batch, policy in zip(micro_batches, policies, strict=True)
    ]
    for micro_batch in pretraining:
        # this loss has no ratio: old log-probs only have to be finite
        unread = torch.zeros_like(micro_batch.loss_weights)
        policy = OldPolicy(proximal=unread, logprobs=unread)
        tasks.append(HeadTask(micro_batch=micro_batch, old=policy, is_pretraining=True))
    for chunk in chunks:
        chunk.zero_grad_buffer()
    outputs = run_schedule(chunks, head, tasks, forward_only=False)
    sums = MiniBatchSums()
    for task, output in zip(tasks, outputs, strict=False):
        if task.is_pretraining:
            logprobs = output.logprobs[task.micro_batch.rows]
            sums.num_pretraining_tokens += len(logprobs)
            sums.pretraining_loss -= logprobs.sum(dtype=torch.float64).item()
        else:
            sums.add(task, output, head.objective)
    return sums, [output.logprobs for output in outputs[: len(micro_batches)]]


def run_schedule(
    chunks: list[DistributedDataParallel],
    head: Callable[..., Any],
    tasks: Sequence[Task],
    *,
    forward_only: bool,
) -> list[Any]:
    """Return the head's output for each task on the last stage; every rank has as many tasks.

    Args:
        head: the model's last step. It returns a tensor, or a dataclass object with a `loss`.
    """
    forward_backward = get_forward_backward_func()
    outputs: list[Any] = forward_backward(
        forward_step_func=partial(_forward_step, head),
        # every chunk processes all micro-batches in the same order
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
    # routers balance neither padding nor pretraining data
    uncounted = task.micro_batch.is_padding[None, :]
    if isinstance(task, HeadTask) and task.is_pretraining:
        uncounted = torch.ones_like(uncounted)
    output = chunk(
        input_ids=task.micro_batch.tokens,
        position_ids=None,
        attention_mask=None,
        packed_seq_params=task.micro_batch.packed,
        padding_mask=uncounted if chunk.config.num_moe_experts else None,
        output_processor=head,
        output_processor_context=task,
    )
    report_progress()
    return output, _loss_and_data


def _loss_and_data(output: Any) -> tuple[Tensor, Tensor, Any]:
    """Return the schedule's triple: loss to differentiate, tokens to divide by, data to return."""
    num_tokens = torch.zeros((), dtype=torch.int)
    if isinstance(output, Tensor):
        return output.sum(), num_tokens, output
    # its graph would keep the other stages' activations until the mini-batch is done
    return output.loss, num_tokens, replace(output, loss=output.loss.detach())
