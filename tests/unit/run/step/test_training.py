"""Updates of a step, and the settings of the trainer."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megadapo.algorithm.config import AlgorithmConfig, ReferenceConfig
from megadapo.algorithm.kl_control import KlControlConfig
from megadapo.algorithm.objective import PolicyObjective
from megadapo.config import load_config
from megadapo.errors import InfraError
from megadapo.run.gpu_sharing import GpuSharing
from megadapo.run.processes import trainer_settings
from megadapo.run.step.training import StepTrainer
from megadapo.trainer.types import UpdateRequest, UpdateResult
from tests.support import REPOSITORY
from tests.support.processes.teacher_stand_in import TeacherStandIn, logprob
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


def test_teachers_server_is_asked_before_an_update():
    """A failure in an update would leave a state that no save takes."""
    seen = []
    ranks: Any = SimpleNamespace(update=lambda request: seen.append(request.batch) or UPDATE)
    batch = random_batch([5, 9])
    with TeacherStandIn() as server:
        reference = ReferenceConfig(server=server.url)
        algorithm = AlgorithmConfig(objective=PolicyObjective(kl_coef=1.0), reference=reference)
        trainer = StepTrainer(ranks, GpuSharing(ranks), algorithm)
        trainer.update(batch, 1)
        server.damage = lambda entries: None
        with pytest.raises(InfraError):
            trainer.update(batch, 2)
    (taught,) = seen
    assert taught.logprobs_ref[4] == pytest.approx(logprob(batch.tokens[:5].tolist(), 4))
    assert trainer.step == 1


def test_engine_that_does_not_sleep_keeps_the_step():
    """The weights have not changed, and a save must take them."""

    def start_update() -> None:
        raise InfraError("no engine is left")

    ranks, gpus = SimpleNamespace(), SimpleNamespace(start_update=start_update)
    trainer = StepTrainer(ranks, gpus, AlgorithmConfig())  # type: ignore[arg-type]
    trainer.step = 2
    with pytest.raises(InfraError):
        trainer.update(random_batch([5]), 3)
    assert trainer.step == 2


def test_model_path_is_absolute(monkeypatch):
    """Ray starts in another folder on other nodes; names on the Hub must not become paths."""
    monkeypatch.chdir(REPOSITORY)
    recipe = REPOSITORY / "configs" / "quickstart.toml"
    settings = trainer_settings(load_config(recipe))
    assert settings.model.path == str(REPOSITORY / "configs" / "quickstart-base")
    elsewhere = trainer_settings(load_config(recipe, ["model.path=some/name"]))
    taught = load_config(REPOSITORY / "configs" / "algorithms" / "distillation.toml")
    assert trainer_settings(taught).algorithm.reference.path == settings.model.path
    assert elsewhere.model.path == "some/name"
