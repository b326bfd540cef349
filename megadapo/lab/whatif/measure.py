"""Measurement of several objectives on one batch, on every rank of the trainer.

Each objective has the micro-batches, the passes, the head and the optimizer's norm of an update, so
the numbers of the run's own objective have the bits of its update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megadapo.algorithm.objective import COVARIANCE_GATES, TOKEN_GATES, PolicyObjective
from megadapo.data.batch import PackedBatch
from megadapo.kernels.policy_head import PolicyHeadOutput
from megadapo.lab.whatif.types import Measured, OldNumbers, TokenGradients, Variant, merged
from megadapo.trainer.batch.micro_batch import MicroBatch, old_policy
from megadapo.trainer.batch.mini_batch import MiniBatch
from megadapo.trainer.critic import add_token_advantages, values_of_tokens
from megadapo.trainer.model.head import PolicyHead
from megadapo.trainer.model.megatron_internals import grads_of_norm
from megadapo.trainer.update.metrics import POLICY_SUMS, Sums, mean_of
from megadapo.trainer.update.step import find_bounds, run_schedule, with_chosen_tokens

if TYPE_CHECKING:
    from megadapo.trainer.rank import TrainerRank


Work = Sequence[tuple[MicroBatch, PolicyHead]]
"""All micro-batches of a batch with the head of one objective."""


Gradient = Sequence[Sequence[Tensor]]
"""This rank's part of a gradient: the tensors of each of megatron-core's optimizers, without copies
of other ranks' parameters."""


def dot(rank: TrainerRank, one: Gradient, other: Gradient) -> float:
    """Return the product of two gradients over all ranks, in float64; collective."""
    total = 0.0
    parts = zip(rank.optimizer.chained_optimizers, one, other, strict=True)
    for optimizer, ours, theirs in parts:
        own = torch.zeros((), dtype=torch.float64, device=rank.device)
        for x, y in zip(ours, theirs, strict=True):
            own += x.flatten().double() @ y.flatten().double()
        torch.distributed.all_reduce(own, group=optimizer.get_grad_stats_parallel_group())
        total += own.item()
    return total


def measure(
    rank: TrainerRank, variants: Sequence[Variant], policy_version: int, old: OldNumbers | None
) -> tuple[list[Measured], OldNumbers | None, TokenGradients | None]:
    """Measure all objectives at the rank's weights; collective, and no weight changes.

    Args:
        variants: the run's own objective first.
        policy_version: of the weights before the step; tokens of other versions are stale.
        old: numbers from before the updates; None: those of the rank's weights.

    Returns:
        The numbers, the same on all ranks; and the tokens' numbers that this rank computed with its
        weights or was given, and their gradients, None on ranks that compute none.
    """
    values, logprobs_ref = _fixed_numbers(rank, variants[0].batch, old)
    if logprobs_ref is not None:
        variants = [
            replace(variant, batch=replace(variant.batch, logprobs_ref=logprobs_ref))
            for variant in variants
        ]
    logprobs_old = None if old is None else old.logprobs
    works = [_work(rank, variant, policy_version, logprobs_old, values) for variant in variants]
    outputs, gradients, norms = [], [], []
    for work in works:
        for chunk in rank.chunks:
            chunk.zero_grad_buffer()
        outputs.append(run_schedule(rank.chunks, work, forward_only=False))
        rank.optimizer.prepare_grads()
        gradients.append(_gradient(rank))
        norms.append(float(rank.optimizer.get_grad_norm()))
    squares = [dot(rank, gradient, gradient) for gradient in gradients]
    products = [dot(rank, gradient, gradients[0]) for gradient in gradients]
    cosines = [
        mean_of(product, math.sqrt(square * squares[0]))
        for product, square in zip(products, squares, strict=True)
    ]
    found = [
        _measured(variant, _sums(rank, work, output), norm, cosine)
        for variant, work, output, norm, cosine in zip(
            variants, works, outputs, norms, cosines, strict=True
        )
    ]
    if not rank.has_results:
        return found, None, None
    num_tokens = len(variants[0].batch.tokens)
    computed = {
        name: np.stack(
            [_of_tokens(num_tokens, *one, name) for one in zip(works, outputs, strict=True)]
        )
        for name in ("logprobs", "distance", "d_policy")
    }
    # the run's own objective, which is the first, has the bits of its update
    logprobs, distance = (merged([*computed[name][::-1]]) for name in ("logprobs", "distance"))
    assert logprobs is not None and distance is not None, "of some objective"
    old_numbers = OldNumbers(logprobs=logprobs, values=values, logprobs_ref=logprobs_ref)
    return found, old_numbers, TokenGradients(d_policy=computed["d_policy"], distance=distance)


def _gradient(rank: TrainerRank) -> Gradient:
    """Copy the gradient in the buffers, which are summed over ranks."""
    return [
        [] if part.is_stub_optimizer else [grad.detach().clone() for grad in grads_of_norm(part)]
        for part in rank.optimizer.chained_optimizers
    ]


def _measured(variant: Variant, sums: Sums, norm: float, cosine: float | None) -> Measured:
    """Return the numbers of an objective from its sums, and from the norm of the whole gradient."""
    tokens = sums["tokens"]
    return Measured(
        loss=sums["policy/loss"] / variant.num_mini_batches,
        grad_norm=norm / variant.num_mini_batches,
        cosine=cosine,
        clip_low=mean_of(sums["policy/clip_low_fraction"], tokens),
        clip_high=mean_of(sums["policy/clip_high_fraction"], tokens),
        effective_samples=mean_of(sums["weight"] ** 2, sums["squared_weight"] * tokens),
        num_tokens=int(tokens),
        num_moved=int(sums["moved"]),
        entropy=mean_of(sums["policy/entropy"], tokens),
    )


def _fixed_numbers(
    rank: TrainerRank, batch: PackedBatch, old: OldNumbers | None
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return [T] of the critic's values and of the reference's log-probs; None without one.

    Both stay fixed over a step. Each objective has some of the tokens, so all are computed.
    """
    if old is not None:
        return old.values, old.logprobs_ref
    split = rank.splitter.split(batch, predicted=batch.is_sampled, policy_version=0)
    values = logprobs_ref = None
    if rank.critic is not None:
        values = _of_batch(batch, split, [rank.critic.values(mini_batch) for mini_batch in split])
    if rank.reference is not None:
        scored = [
            [
                logprobs[micro_batch.rows]
                for micro_batch, logprobs in zip(mini_batch, parts, strict=False)
            ]
            for mini_batch, parts in zip(split, rank.reference.logprobs(split), strict=True)
        ]
        logprobs_ref = _of_batch(batch, split, scored)
    return values, logprobs_ref


def _of_batch(
    batch: PackedBatch, split: Sequence[MiniBatch], numbers: Sequence[Sequence[Tensor]]
) -> np.ndarray:
    """Return [T] float32 of the micro-batches' [R] on this rank, NaN elsewhere."""
    found = np.full(len(batch.tokens), np.nan, dtype=np.float32)
    for mini_batch, parts in zip(split, numbers, strict=True):
        for micro_batch, own in zip(mini_batch, parts, strict=False):
            found[micro_batch.batch_index] = own.cpu().numpy()
    return found


def _work(
    rank: TrainerRank,
    variant: Variant,
    policy_version: int,
    logprobs_old: np.ndarray | None,
    values: np.ndarray | None,
) -> Work:
    """Return the batch's micro-batches with the head of one objective, as an update has them."""
    importance, objective = variant.algorithm.importance, variant.algorithm.objective
    predicted = variant.batch.predicted(
        policy_version, leaves_out_stale=importance.stale_logprobs == "none"
    )
    split = rank.splitter.split(variant.batch, predicted=predicted, policy_version=policy_version)
    has_reference = objective.kl_coef != 0.0
    # otherwise the head itself computes the old log-probs
    if logprobs_old is not None or has_reference or objective.gate in TOKEN_GATES:
        split = [_set_old_logprobs(rank, mini_batch, variant, logprobs_old) for mini_batch in split]
    if has_reference:
        assert rank.reference is not None, "the run's own objective has it"
        split = rank.reference.add_logprobs(
            variant.batch,
            predicted,
            split,
            variant.algorithm,
            kl_reward_coef=variant.kl_reward_coef,
        )
    if variant.algorithm.advantage == "gae":
        assert values is not None, "the run's own objective has a critic"
        known = values_of_tokens(split, values, rank.device)
        split = add_token_advantages(
            split, known, variant.algorithm, kl_coef=variant.kl_reward_coef, device=rank.device
        )
    head = replace(rank.head, objective=objective, importance=importance)
    work = []
    for number, mini_batch in enumerate(split):
        if objective.gate in COVARIANCE_GATES:
            mini_batch, _ = with_chosen_tokens(
                rank.chunks,
                head,
                mini_batch,
                variant.batch.tokens_with_loss(number),
                # as the update of this number in the step that follows these weights
                draw=(rank.settings.seed, policy_version + 1, number),
            )
        own = replace(head, objective=_with_bounds(rank, mini_batch, variant))
        work += [(micro_batch, own) for micro_batch in mini_batch]
    return work


def _set_old_logprobs(
    rank: TrainerRank, mini_batch: MiniBatch, variant: Variant, logprobs_old: np.ndarray | None
) -> MiniBatch:
    if logprobs_old is None:
        proximal = rank.logprobs_of(mini_batch)
    else:
        proximal = [
            micro_batch.at_rows(logprobs_old[micro_batch.batch_index]) for micro_batch in mini_batch
        ]
    pairs = zip(mini_batch, proximal, strict=False)
    importance = variant.algorithm.importance
    return mini_batch.with_policy([old_policy(*pair, importance) for pair in pairs])


def _with_bounds(rank: TrainerRank, mini_batch: MiniBatch, variant: Variant) -> PolicyObjective:
    """Return the objective, with gate "bapo" with bounds searched at the rank's weights."""
    objective, config = variant.algorithm.objective, variant.algorithm.bapo
    if objective.gate != "bapo":
        return objective
    head = replace(rank.head, objective=objective)
    bounds = find_bounds(rank.chunks, head, mini_batch, config)
    return bounds.put_into(objective)


def _sums(rank: TrainerRank, work: Work, outputs: Sequence[PolicyHeadOutput]) -> Sums:
    sums = Sums((*POLICY_SUMS, "moved", "weight", "squared_weight"))
    for (micro_batch, head), output in zip(work, outputs, strict=False):
        if micro_batch.logprobs_old is None:
            micro_batch = old_policy(micro_batch, output.logprobs, head.importance)
        sums.add(micro_batch, output, head)
        ratio = output.ratio
        weights = torch.ones_like(ratio) if head.objective.ratio == "none" else ratio
        if micro_batch.importance_weights is not None:
            weights = weights * micro_batch.importance_weights
        weights = weights[ratio != 0].double()
        sums["moved"] += (output.d_policy != 0).sum().item()
        sums["weight"] += weights.sum().item()
        sums["squared_weight"] += weights.square().sum().item()
    return sums.reduced(rank.device)


def _of_tokens(
    num_tokens: int, work: Work, outputs: Sequence[PolicyHeadOutput], name: str
) -> np.ndarray:
    """Return [T] of a field of the head's outputs, NaN on tokens that this rank has not."""
    found = np.full(num_tokens, np.nan, dtype=np.float32)
    for (micro_batch, _), output in zip(work, outputs, strict=True):
        values: Tensor = getattr(output, name)
        found[micro_batch.batch_index] = values[micro_batch.rows].cpu().numpy()
    return found
