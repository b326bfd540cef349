"""One rollout step of a rank: old log-probs, what they are held against, and the updates."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from megadapo.algorithm.bapo import BapoBounds
from megadapo.cluster.watch.heartbeat import report_progress
from megadapo.data.batch import PackedBatch
from megadapo.trainer.batch.micro_batch import MicroBatch, trained_tokens, version_gaps
from megadapo.trainer.batch.off_policy import OldPolicy, old_policy
from megadapo.trainer.critic.step import CriticStep
from megadapo.trainer.rank import BETWEEN_UPDATES, TrainerRank
from megadapo.trainer.reference import with_kl_in_reward, with_reference
from megadapo.trainer.types import UpdateResult
from megadapo.trainer.update.clip_bounds import BoundSearch
from megadapo.trainer.update.measure import UpdateRecorder, probe_shape
from megadapo.trainer.update.metrics import MiniBatchSums, summarize
from megadapo.trainer.update.optimizer import gather_weights_now, step_if_finite
from megadapo.trainer.update.step import compute_gradients


def update_rank(
    rank: TrainerRank,
    batch: PackedBatch,
    *,
    policy_version: int,
    step: int,
    kl_reward_coef: float | None = None,
    texts: PackedBatch | None = None,
    recorder: UpdateRecorder | None = None,
) -> UpdateResult:
    """All mini-batches of one rollout step, one optimizer update each.

    Old log-probs are taken for the whole batch before the first update, in the micro-batches
    of the updates.

    Args:
        policy_version: of the present weights, to find the tokens they sampled.
        step: rollout step, which decides the learning rate; the first is 1.
        kl_reward_coef: of the KL divergence in the reward, in place of the objective's.
        texts: as many mini-batches of texts, whose language-model loss is part of the updates.
        recorder: is told what this rank computes.

    Returns:
        The same numbers on every rank.
    """
    recorder = recorder or UpdateRecorder(batch, ())
    rank.check_experts(batch)
    rank.offload.bring("parameters")
    rank.offload.fetch("optimizer")
    lr = _learning_rate(rank, step)
    importance, objective = rank.settings.importance, rank.settings.objective
    if kl_reward_coef is None:
        kl_reward_coef = objective.kl_reward_coef
    trained, num_dropped = trained_tokens(batch)
    gaps = version_gaps(batch, policy_version)
    predicted = trained & (gaps == 0) if importance.stale_logprobs == "none" else trained
    cut = rank.cutter.cut(batch, predicted=predicted, policy_version=policy_version)
    of_texts = [()] * len(cut) if texts is None else rank.cutter.cut_responses(texts)
    with rank.experts.counted():
        old = [_old_policies(rank, micro_batches, recorder) for micro_batches in cut]
    proximal = [policy.proximal for policy in old[0]] if old else []
    old = add_reference_logprobs(rank, batch, predicted, cut, old, kl_reward_coef=kl_reward_coef)
    probe = probe_shape(
        cut,
        build=partial(rank.cutter.alone, batch, predicted=predicted, policy_version=policy_version),
        score=rank.logprobs_of,
        multiple_of=rank.cutter.multiple_of,
    )
    values = None
    if rank.critic is not None:
        values = CriticStep(rank.critic, cut, old, step, kl_coef=kl_reward_coef)
    old = old if values is None else values.old
    search = bound_search(rank)
    lengths = np.diff(batch.cu_seqlens)
    reduced, grad_norms, bounds = [], [], []
    rank.offload.bring(*BETWEEN_UPDATES)
    for number, (micro_batches, policies) in enumerate(zip(cut, old, strict=True)):
        rank.experts.prepare(int(lengths[batch.mini_batches[number]].sum()))
        sums, found = _gradients(rank, micro_batches, policies, of_texts[number], recorder, search)
        bounds += found
        if number == 0:
            probe.add_to(sums, micro_batches, proximal)
        sums = sums.reduced(contributes=rank.has_results, device=rank.device)
        loss = sums.loss + sums.text_loss
        outcome = step_if_finite(rank.optimizer, loss=loss, lr=lr)
        reduced.append(sums)
        if outcome.applied:
            grad_norms.append(outcome.grad_norm)
        if values is not None:
            values.update(number)
        report_progress()
    # whoever reads weights after this (save, export, weight updates) finds them whole
    gather_weights_now(rank.chunks)
    if rank.reference is not None:
        rank.reference.follow(step)
    critic = None if values is None else values.result()
    rank.offload.leave(*BETWEEN_UPDATES)
    return summarize(
        reduced,
        grad_norms=grad_norms,
        skipped_updates=len(cut) - len(grad_norms),
        num_dropped_tokens=num_dropped,
        lr=lr or 0.0,
        version_gaps=gaps[trained],
        importance=importance,
        bounds=bounds,
        kl_coef=objective.kl_loss_coef + kl_reward_coef,
        critic=critic,
        experts=rank.experts.result(),
    )


def add_reference_logprobs(
    rank: TrainerRank,
    batch: PackedBatch,
    trained: np.ndarray,
    cut: Sequence[Sequence[MicroBatch]],
    old: list[list[OldPolicy]],
    *,
    kl_reward_coef: float,
) -> list[list[OldPolicy]]:
    """`old` with the reference's log-probs, from the same micro-batches, where there is one.

    With new advantages where rewards have a KL divergence in them.
    """
    if rank.reference is None:
        return old
    with rank.reference.in_place():
        # another model, with routers of its own
        logprobs_ref = [rank.logprobs_of(part, replays=False) for part in cut]
    objective = rank.settings.objective
    held = [with_reference(*parts, objective) for parts in zip(cut, old, logprobs_ref, strict=True)]
    if objective.kl_in == "loss" or rank.critic is not None:
        return held
    return with_kl_in_reward(
        batch,
        trained,
        cut,
        held,
        settings=rank.settings,
        kl_coef=kl_reward_coef,
        contributes=rank.has_results,
        device=rank.device,
    )


def bound_search(rank: TrainerRank) -> BoundSearch | None:
    """What finds the clip bounds of a step's updates, where they are not fixed."""
    if rank.settings.objective.gate != "bapo":
        return None
    return BoundSearch(
        rank.settings.bapo,
        score=rank.logprobs_of,
        contributes=rank.has_results,
        device=rank.device,
    )


def _old_policies(
    rank: TrainerRank, micro_batches: Sequence[MicroBatch], recorder: UpdateRecorder
) -> list[OldPolicy]:
    """From the mini-batch's old log-probs; how long they take is this rank's own speed."""
    start = time.perf_counter()
    logprobs = rank.logprobs_of(micro_batches)
    if rank.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    recorder.add_share(micro_batches, time.perf_counter() - start)
    return [
        old_policy(micro_batch, values, rank.settings.importance)
        for micro_batch, values in zip(micro_batches, logprobs, strict=False)
    ]


def _learning_rate(rank: TrainerRank, step: int) -> float | None:
    """None while the critic alone is trained."""
    critic = rank.settings.critic
    if critic is not None and step <= critic.warmup:
        return None
    return rank.settings.trainer.optimizer.lr_at(step)


def _gradients(
    rank: TrainerRank,
    micro_batches: Sequence[MicroBatch],
    old: list[OldPolicy],
    texts: Sequence[MicroBatch],
    recorder: UpdateRecorder,
    search: BoundSearch | None,
) -> tuple[MiniBatchSums, list[BapoBounds]]:
    """Leave the mini-batch's gradients in the buffers; `old`: what it is held against.

    Returns its sums and the clip bounds that were searched for it, if any.
    """
    head, bounds = rank.head, []
    if search is not None:
        bounds = [search.bounds(micro_batches, old)]
        head = replace(head, objective=bounds[0].put_into(head.objective))
    sums, logprobs = compute_gradients(rank.chunks, head, micro_batches, old, texts)
    if rank.has_results:
        recorder.add_update(micro_batches, old, logprobs)
    if search is not None:
        search.observe(micro_batches, old, logprobs)
    return sums, bounds
