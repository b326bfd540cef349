"""One mini-batch through megatron-core's pipeline schedule: log-probs, or loss and gradients.

Loss weights contain the whole reduction, so nothing is divided here: losses and gradients are sums
over micro-batches and ranks for every split. With BAPO, a search over such sums finds the clip
bounds of each update before its gradients; other gates choose tokens of the whole mini-batch there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.profiler import record_function

from megadapo.algorithm.bapo import BapoBounds, BapoConfig, bapo_sums, num_bapo_sums, search_bounds
from megadapo.algorithm.covariance import choose_tokens
from megadapo.algorithm.objective import LIKELIHOOD, MAX_LOG_RATIO
from megadapo.cluster.watch.heartbeat import report_progress
from megadapo.trainer.batch.micro_batch import MicroBatch, old_policy
from megadapo.trainer.batch.mini_batch import MiniBatch
from megadapo.trainer.model.head import PolicyHead
from megadapo.trainer.model.parallel import has_results
from megadapo.trainer.update.metrics import Sums

Work = tuple[MicroBatch, Callable[..., Any]]
"""A micro-batch, and the `output_processor` that turns its hidden states into the result: a tensor,
or a dataclass object with a `loss`."""


def with_old_policy(
    chunks: list[DistributedDataParallel], head: PolicyHead, split: Sequence[MiniBatch]
) -> tuple[list[MiniBatch], float]:
    """Return a step's mini-batches with their old policy, and the seconds of the log-probs."""
    found, seconds = [], 0.0
    for mini_batch in split:
        start = time.perf_counter()
        logprobs = compute_logprobs(chunks, head, mini_batch)
        if mini_batch.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        seconds += time.perf_counter() - start
        pairs = zip(mini_batch, logprobs, strict=False)
        computed = [old_policy(*pair, head.importance) for pair in pairs]
        found.append(mini_batch.with_policy(computed))
    return found, seconds


@torch.no_grad()
@record_function("megadapo::logprobs")
def compute_logprobs(
    chunks: list[DistributedDataParallel],
    head: PolicyHead,
    micro_batches: Sequence[MicroBatch],
) -> list[Tensor]:
    """Return log-probs [T] of each micro-batch on the last pipeline stage, else an empty list."""
    work = [(micro_batch, head.logprobs) for micro_batch in micro_batches]
    return run_schedule(chunks, work, forward_only=True)


@record_function("megadapo::gradients")
def compute_gradients(
    chunks: list[DistributedDataParallel],
    head: PolicyHead,
    micro_batches: Sequence[MicroBatch],
    pretraining: Sequence[MicroBatch] = (),
) -> tuple[Sums, list[MicroBatch]]:
    """Leave the mini-batch's summed gradients in the buffers of the rank's chunks.

    Args:
        micro_batches: on the last pipeline stage with their old policy, or all without it if it
            is the policy before this update.
        pretraining: further micro-batches, with the loss of a language model.

    Returns:
        The sums of all ranks; and this rank's micro-batches with their old policy and log-probs,
        none except on the last pipeline stage.
    """
    work: list[Work] = [(micro_batch, head) for micro_batch in micro_batches]
    likelihood = replace(head, objective=LIKELIHOOD, temperature=1.0)
    work += [(_for_likelihood(micro_batch), likelihood) for micro_batch in pretraining]
    for chunk in chunks:
        chunk.zero_grad_buffer()
    outputs = run_schedule(chunks, work, forward_only=False)
    sums, computed = Sums(), []
    for (micro_batch, used), output in zip(work, outputs, strict=False):
        if used is head:
            if micro_batch.logprobs_old is None:
                micro_batch = old_policy(micro_batch, output.logprobs, head.importance)
            if micro_batch.logprobs_update is None:
                micro_batch = replace(micro_batch, logprobs_update=output.logprobs)
            computed.append(micro_batch)
            sums.add(micro_batch, output, head)
        else:
            logprobs = output.logprobs[micro_batch.rows]
            sums["pretraining/tokens"] += len(logprobs)
            sums["pretraining/loss"] -= logprobs.sum(dtype=torch.float64).item()
    return sums.reduced(next(chunks[0].parameters()).device), computed


def without_experts(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Return the micro-batches without the engines' experts: routers choose their own."""
    return [replace(micro_batch, experts=None) for micro_batch in micro_batches]


def _for_likelihood(micro_batch: MicroBatch) -> MicroBatch:
    """Return pretraining data as the policy head and routers take it."""
    return replace(
        micro_batch,
        # routers do not balance it
        is_uncounted=torch.ones_like(micro_batch.is_uncounted),
        # the loss has no ratio: old log-probs only have to be finite
        logprobs_old=torch.zeros_like(micro_batch.loss_weights),
    )


def run_schedule(
    chunks: list[DistributedDataParallel],
    work: Sequence[Work],
    *,
    forward_only: bool,
) -> list[Any]:
    """Run the forward passes and, unless `forward_only`, the backward passes; collective.

    Every rank passes the same number of micro-batches.

    Returns:
        The result for each micro-batch on the last stage, else an empty list.
    """
    forward_backward = get_forward_backward_func()
    outputs: list[Any] = forward_backward(
        forward_step_func=_forward_step,
        # every chunk processes all micro-batches in the same order
        data_iterator=[iter(work) for _ in chunks] if len(chunks) > 1 else iter(work),
        model=chunks,
        num_microbatches=len(work),
        # the true lengths travel with the activations (variable_seq_lengths)
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return outputs


def _forward_step(work: Iterator[Work], chunk: DistributedDataParallel) -> tuple[Any, Any]:
    micro_batch, head = next(work)
    output = chunk(
        input_ids=micro_batch.tokens,
        position_ids=None,
        attention_mask=None,
        packed_seq_params=micro_batch.packed,
        padding_mask=micro_batch.is_uncounted[None, :] if chunk.config.num_moe_experts else None,
        output_processor=head,
        output_processor_context=micro_batch,
    )
    report_progress()
    return output, _loss_and_data


def _loss_and_data(output: Any) -> tuple[Tensor, Tensor, Any]:
    """Return the schedule's triple: loss to differentiate, tokens to divide by, data to return."""
    num_tokens = torch.zeros((), dtype=torch.int)
    if isinstance(output, Tensor):
        return output.sum(), num_tokens, output
    # the loss's graph would keep the other stages' activations until the mini-batch is done
    return output.loss, num_tokens, replace(output, loss=output.loss.detach())


def find_bounds(
    chunks: list[DistributedDataParallel],
    head: PolicyHead,
    micro_batches: MiniBatch,
    config: BapoConfig,
    *,
    is_first: bool = False,
) -> BapoBounds:
    """Return the clip bounds of an update with gate "bapo"; collective.

    Args:
        is_first: whether no update of the step was before, so that the current log-probs are the
            proximal ones.
    """
    computed: list[Tensor] | None = None
    if not is_first or config.statistic == "logit_share":
        work = [(micro_batch, head.logprobs_and_distances) for micro_batch in micro_batches]
        with torch.no_grad():
            computed = run_schedule(chunks, work, forward_only=True)
    total = torch.zeros(num_bapo_sums(config), dtype=torch.float64, device=micro_batches.device)
    # tensor-parallel ranks have the same tokens
    if has_results():
        known = [None] * len(micro_batches) if computed is None else computed
        for micro_batch, current in zip(micro_batches, known, strict=True):
            total += sums_of(micro_batch, current, config, dual_clip=head.objective.dual_clip)
    torch.distributed.all_reduce(total)
    return search_bounds(total.cpu().numpy(), config)


def with_chosen_tokens(
    chunks: list[DistributedDataParallel],
    head: PolicyHead,
    micro_batches: MiniBatch,
    tokens: np.ndarray,
    *,
    draw: Sequence[int],
    is_first: bool = False,
) -> tuple[MiniBatch, float]:
    """Return the mini-batch with the choice of gate "clip_cov" or "kl_cov", and its share.

    Collective. Every rank gets the numbers of all tokens in the order of the batch, so the choice
    has the same bits at every split that gives the log-probs the same bits. `tokens`: places in the
    batch of the mini-batch's tokens with a loss, ascending. `draw` and `is_first` are those of
    `choose_tokens` and `find_bounds`.
    """
    current = [one.proximal for one in micro_batches if one.proximal is not None]
    if not is_first:
        current = compute_logprobs(chunks, head, micro_batches)
    # log-prob, old log-prob and advantage of each token, and 1 if a rank predicts it
    values = torch.zeros(4, len(tokens), device=micro_batches.device)
    places = []
    for micro_batch, present in zip(micro_batches, current, strict=False):
        assert micro_batch.logprobs_old is not None, "computed before the first update"
        has_loss = np.isin(micro_batch.batch_index, tokens)
        own = np.searchsorted(tokens, micro_batch.batch_index[has_loss])
        places.append((has_loss, own))
        found = torch.stack(
            [present, micro_batch.logprobs_old, micro_batch.advantages, torch.ones_like(present)]
        )
        for other in (micro_batch.logprobs_ref, micro_batch.importance_weights):
            # the head drops tokens without these
            found = found if other is None else found.masked_fill(~other.isfinite(), math.nan)
        if has_results():
            rows = micro_batch.rows[torch.from_numpy(has_loss).to(found.device)]
            values[:, torch.from_numpy(own).to(found.device)] = found[:, rows]
    # a token has one rank, so the sums are exact
    torch.distributed.all_reduce(values)
    numbers = values.cpu().numpy()
    known = np.isfinite(numbers).all(axis=0) & (numbers[3] == 1.0)
    chosen = np.zeros(len(tokens), dtype=np.float32)
    logprobs, old, advantages, _ = numbers[:, known]
    chosen[known] = choose_tokens(logprobs, old, advantages, head.objective, draw=draw)
    computed = []
    for micro_batch, (has_loss, own) in zip(micro_batches, places, strict=False):
        of_rows = np.zeros(len(has_loss), dtype=np.float32)
        of_rows[has_loss] = chosen[own]
        computed.append(replace(micro_batch, is_chosen=micro_batch.at_rows(of_rows)))
    return micro_batches.with_policy(computed), float(chosen.mean()) if len(chosen) else 0.0


def sums_of(
    micro_batch: MicroBatch,
    current: Tensor | None,
    config: BapoConfig,
    *,
    dual_clip: float | None = None,
) -> Tensor:
    """Return `bapo_sums` of a micro-batch's tokens with their loss and importance weights.

    Tokens that the head drops do not count.

    Args:
        current: [2, T] log-probs and distances under the current weights; None: the proximal
            log-probs, without distances.
    """
    old = micro_batch.logprobs_old
    logprobs = micro_batch.proximal if current is None else current[0]
    assert old is not None and logprobs is not None, "computed before the first update"
    known = (micro_batch.loss_weights != 0) & old.isfinite()
    advantages = micro_batch.advantages * micro_batch.loss_weights
    if config.statistic == "logit_share":
        assert current is not None, "find_bounds computes it"
        advantages = advantages * current[1]
    if micro_batch.importance_weights is not None:
        known = known & micro_batch.importance_weights.isfinite()
        advantages = advantages * micro_batch.importance_weights
    rows = micro_batch.rows[known[micro_batch.rows]]
    log_ratios = (logprobs[rows] - old[rows]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return bapo_sums(log_ratios.exp(), advantages[rows], config, dual_clip=dual_clip)
