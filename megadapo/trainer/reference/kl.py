"""What the KL divergence to the reference policy does to a step: a term of the loss, or rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megadapo.algorithm.kl_reward import advantages_with_kl
from megadapo.algorithm.objective import MAX_LOG_RATIO, PolicyObjective
from megadapo.algorithm.reference import kl_estimates
from megadapo.data.batch import PackedBatch
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.batch.off_policy import OldPolicy
from megadapo.trainer.settings import TrainerSettings


def with_reference(
    micro_batches: Sequence[MicroBatch],
    old: Sequence[OldPolicy],
    logprobs_ref: Sequence[Tensor],
    objective: PolicyObjective,
) -> list[OldPolicy]:
    """What a mini-batch's update is held against, and what the reference says of it.

    Args:
        micro_batches: of the mini-batch.
        old: of each of them; empty except on the last pipeline stage.
        logprobs_ref: [T] of each of them, from the same shapes as the old ones; empty as `old` is.
        objective: which estimator, and where it enters.
    """
    held = []
    for micro_batch, policy, values in zip(micro_batches, old, logprobs_ref, strict=False):
        rows = micro_batch.rows
        gap = (values[rows] - policy.proximal[rows]).double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        # held against itself, the old policy has a ratio of 1
        kl = kl_estimates(gap, torch.ones_like(gap), objective.kl_value)
        in_loss = objective.kl_loss_coef != 0.0
        held.append(replace(policy, kl=kl, logprobs_ref=values if in_loss else None))
    return held


def with_kl_in_reward(
    batch: PackedBatch,
    trained: np.ndarray,
    cut: Sequence[Sequence[MicroBatch]],
    old: Sequence[Sequence[OldPolicy]],
    *,
    settings: TrainerSettings,
    kl_coef: float,
    contributes: bool,
    device: torch.device,
) -> list[list[OldPolicy]]:
    """Advantages of each token from rewards less the KL divergence; collective over all ranks.

    Every rank gets the KL divergence of every token and computes all advantages alike.

    Args:
        trained: [T] bool, the tokens of the batch that have a KL divergence.
        cut: the rank's micro-batches of each mini-batch.
        old: of each of them, with its KL divergence; empty except on the last pipeline stage.
        kl_coef: weight of the KL divergence in the reward.
        contributes: whether this rank's tokens count; tensor-parallel ranks have the same.

    Returns:
        `old` with these advantages.
    """
    num_tokens = np.add.reduceat(trained, batch.cu_seqlens[:-1], dtype=np.int64)
    kl = _of_all_tokens(batch, cut, old, contributes=contributes, device=device)
    advantages = np.zeros(len(batch.tokens))
    advantages[trained] = advantages_with_kl(
        batch.rewards,
        kl[trained],
        num_tokens,
        batch.group_sizes,
        kl_coef=kl_coef,
        rule=settings.advantage,
        normalize_by_std=settings.normalize_by_std,
    )
    return [
        [
            replace(policy, advantages=_at_rows(micro_batch, advantages))
            for micro_batch, policy in zip(micro_batches, policies, strict=False)
        ]
        for micro_batches, policies in zip(cut, old, strict=True)
    ]


def _of_all_tokens(
    batch: PackedBatch,
    cut: Sequence[Sequence[MicroBatch]],
    old: Sequence[Sequence[OldPolicy]],
    *,
    contributes: bool,
    device: torch.device,
) -> np.ndarray:
    """[T] float64, each token's from the one rank that has it; 0 where nobody has."""
    kl = torch.zeros(len(batch.tokens), dtype=torch.float64)
    if contributes:
        for micro_batches, policies in zip(cut, old, strict=True):
            for micro_batch, policy in zip(micro_batches, policies, strict=True):
                assert policy.kl is not None, "the reference comes first"
                kl[torch.from_numpy(micro_batch.source)] = policy.kl.cpu()
    kl = kl.to(device)
    torch.distributed.all_reduce(kl)
    return kl.cpu().numpy()


def _at_rows(micro_batch: MicroBatch, values: np.ndarray) -> Tensor:
    """[T] fp32 of the micro-batch from one value for each token of the batch."""
    spread = torch.zeros_like(micro_batch.advantages)
    own = torch.from_numpy(values[micro_batch.source]).to(spread)
    spread[micro_batch.rows] = own
    return spread
