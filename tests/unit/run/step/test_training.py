"""Updates of a step, and the settings of the trainer."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.kl_control import KlControlConfig
from megadapo.algorithm.objective import PolicyObjective
from megadapo.run.processes import GpuSharing
from megadapo.run.step.training import StepTrainer
from megadapo.trainer.types import UpdateRequest, UpdateResult
from tests.support.runs.step_results import UPDATE
from tests.support.trainer.batches import random_batch


def test_critic_warmup_keeps_kl_coefficient():
    """Observing a divergence of 0 while the policy does not change would lower it."""
    results = [
        replace(UPDATE, metrics=UPDATE.metrics | {"policy/lr": lr, "kl/mean": 0.0})
        for lr in (0.0, 0.0, 1e-6, 1e-6)
    ]
    coefs = []

    def update(request: UpdateRequest) -> UpdateResult:
        coefs.append(request.kl_reward_coef)
        return results.pop(0)

    algorithm = AlgorithmConfig(
        objective=PolicyObjective(kl_coef=0.02, kl_in="reward", kl_value="k1"),
        kl_control=KlControlConfig(target=0.1, horizon=100),
        normalize_by_std=False,
    )
    ranks: Any = SimpleNamespace(update=update)
    trainer = StepTrainer(ranks, GpuSharing(ranks), algorithm)
    batch = random_batch([5] * 10)
    for step in (1, 2, 3, 4):
        trainer.update(batch, step)
    assert coefs == [0.02] * 3 + [pytest.approx(0.02 * (1 - 0.2 * 10 / 100))]


@pytest.mark.parametrize("checks", [True, False])
def test_ranks_are_told_whether_to_check_the_first_ratio(checks):
    seen = []
    ranks: Any = SimpleNamespace(
        update=lambda request: seen.append(request.checks_first_ratio) or UPDATE
    )
    trainer = StepTrainer(ranks, GpuSharing(ranks), AlgorithmConfig())
    trainer.update(random_batch([5]), 1, checks_first_ratio=checks)
    assert seen == [checks]
