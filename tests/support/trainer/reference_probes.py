"""Actions of a rank's reference policy for tests; they run inside the trainer processes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megadapo.algorithm.objective import PolicyObjective
from tests.support.trainer.probes import (
    build,
    gathered,
    gradients_under,
    split_of,
    steps_of,
    with_old_policy,
)

if TYPE_CHECKING:
    from megadapo.trainer.rank import TrainerRank


def gradients_by_estimator(
    rendezvous, settings, batch, cases: dict[str, PolicyObjective], scale: float
):
    """Return rank 0's gradients by objective; policy weights are `scale` times the reference's."""
    rank, with_kl = scaled(rendezvous, settings, batch, scale)
    found = {}
    for name, objective in cases.items():
        first, *_ = with_kl(0.0, objective=objective)
        head = replace(rank.head, objective=objective)
        found[name] = gradients_under(rank, head, first)
    return found if rendezvous.rank == 0 else None


def scaled(rendezvous, settings, batch, scale: float):
    """Return a rank whose policy's weights were multiplied, which the reference's are not, and a
    function that returns mini-batches with the divergence, of old policies a little off the
    current one."""
    import torch

    rank = build(rendezvous, settings)
    with torch.no_grad():
        for parameter in rank.parameters.values():
            parameter.mul_(scale)
    old = [with_old_policy(rank, part, rank.logprobs_of(part)) for part in split_of(rank, batch)]

    def with_kl(kl_reward_coef: float, **changes: Any) -> Any:
        algorithm = settings.algorithm.model_copy(update=changes)
        return rank.reference.add_logprobs(
            batch, batch.is_trained, old, algorithm, kl_reward_coef=kl_reward_coef
        )

    return rank, with_kl


def advantages_by_rule(rendezvous, settings, batch, rules: list[str], scale: float):
    """Return by rule [T] advantages of tokens that this rank computes, NaN elsewhere."""
    _, with_kl = scaled(rendezvous, settings, batch, scale)
    found = {}
    for rule in rules:
        split = with_kl(settings.algorithm.objective.kl_reward_coef, advantage=rule)
        values = np.full(len(batch.tokens), np.nan)
        for micro_batch in (one for mini_batch in split for one in mini_batch):
            values[micro_batch.batch_index] = micro_batch.advantages[micro_batch.rows].numpy()
        found[rule] = values
    return found


def follow(
    rendezvous, settings, batch, num_steps, *, load=None, save=None, first_step=1
) -> list[tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Return result, policy weights and reference weights, before the first step and after each."""
    rank = build(rendezvous, settings, load)
    steps = steps_of(rank, batch, range(first_step, first_step + num_steps), save=save)
    seen: list[Any] = [({}, gathered(rank), reference_weights(rank))]
    seen += [(result, gathered(rank), reference_weights(rank)) for result in steps]
    return seen


def reference_weights(rank: TrainerRank) -> dict[str, np.ndarray]:
    assert rank.reference is not None
    with rank.reference.swapped_in():
        return gathered(rank)
