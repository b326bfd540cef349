"""Actions of a rank's reference policy for tests; they run inside the trainer processes."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megadapo.algorithm.objective import PolicyObjective
from megadapo.data.batch import PackedBatch
from megadapo.errors import CheckpointError
from megadapo.trainer.types import Rendezvous, TrainerSettings
from tests.support.trainer.probes import (
    Gradients,
    build,
    gathered,
    gradients_under,
    save_at,
    shifted,
    update,
    weights,
)

if TYPE_CHECKING:
    from megadapo.trainer.batch.mini_batch import MiniBatch
    from megadapo.trainer.batch.off_policy import OldPolicy
    from megadapo.trainer.rank import TrainerRank


def gradients_by_estimator(
    rendezvous: Rendezvous,
    settings: TrainerSettings,
    batch: PackedBatch,
    cases: dict[str, PolicyObjective],
    scale: float,
) -> dict[str, Gradients] | None:
    """Loss and full gradients of the first mini-batch for several objectives, from rank 0.

    The policy's weights are those of the reference times `scale`.
    """
    rank = scaled(build(rendezvous, settings), scale)
    trained, split, old = shifted_policies(rank, batch)
    found = {}
    for name, objective in cases.items():
        rank.reference.settings = replace(settings, objective=objective)
        with_kl, *_ = rank.reference.add_logprobs(batch, trained, split, old, kl_reward_coef=0.0)
        head = replace(rank.head, objective=objective)
        found[name] = gradients_under(rank, head, split[0], with_kl)
    return found if rendezvous.rank == 0 else None


def scaled(rank: TrainerRank, scale: float) -> TrainerRank:
    """With the policy's weights multiplied, which the reference's are not."""
    import torch

    with torch.no_grad():
        for parameter in rank.parameters.values():
            parameter.mul_(scale)
    return rank


def shifted_policies(
    rank: TrainerRank, batch: PackedBatch
) -> tuple[np.ndarray, list[MiniBatch], list[list[OldPolicy]]]:
    """Return [T] trained tokens, the rank's micro-batches of each update, and their old policies.

    Old log-probs are a little off the current ones.
    """
    from megadapo.trainer.batch.micro_batch import trained_tokens
    from megadapo.trainer.batch.off_policy import old_policy

    trained, _ = trained_tokens(batch)
    split = rank.splitter.split(batch, predicted=trained, policy_version=0)
    old = [
        [
            old_policy(micro_batch, shifted(micro_batch, values), rank.settings.importance)
            for micro_batch, values in zip(part, rank.logprobs_of(part), strict=False)
        ]
        for part in split
    ]
    return trained, split, old


def advantages_by_rule(
    rendezvous: Rendezvous,
    settings: TrainerSettings,
    batch: PackedBatch,
    rules: list[str],
    scale: float,
) -> dict[str, np.ndarray]:
    """[T] advantages of tokens that this rank computes, NaN elsewhere."""
    rank = scaled(build(rendezvous, settings), scale)
    trained, split, old = shifted_policies(rank, batch)
    found = {}
    for rule in rules:
        rank.reference.settings = replace(settings, advantage=rule)
        with_kl = rank.reference.add_logprobs(
            batch, trained, split, old, kl_reward_coef=settings.objective.kl_reward_coef
        )
        values = np.full(len(batch.tokens), np.nan)
        for micro_batches, policies in zip(split, with_kl, strict=True):
            for micro_batch, policy in zip(micro_batches, policies, strict=False):
                values[micro_batch.source] = policy.advantages[micro_batch.rows].numpy()
        found[rule] = values
    return found


def follow(
    rendezvous: Rendezvous,
    settings: TrainerSettings,
    batch: PackedBatch,
    num_steps: int,
    *,
    load: Path | None = None,
    save: tuple[int, Path] | None = None,
    first_step: int = 1,
) -> list[tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Before the first step and after each: its result, the policy's weights, the reference's.

    `save`: after which step to save, and where.
    """
    rank = build(rendezvous, settings)
    if load is not None:
        rank.load(load)
    seen: list[Any] = [({}, weights(rank), reference_weights(rank))]
    for step in range(first_step, first_step + num_steps):
        result = update(rank, batch, policy_version=0, step=step)
        seen.append((asdict(result), weights(rank), reference_weights(rank)))
        if save is not None and step == save[0]:
            save_at(rank, save[1])
    return seen


def reference_weights(rank: TrainerRank) -> dict[str, np.ndarray]:
    assert rank.reference is not None
    with rank.reference.in_place():
        return gathered(rank, rank.parameters)


def load_refusal(rendezvous: Rendezvous, settings: TrainerSettings, folder: Path) -> str:
    try:
        build(rendezvous, settings).load(folder)
    except CheckpointError as error:
        return str(error)
    return "loaded"
