"""The parts of a run: updates, and the settings of the trainer."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megadapo.algorithm.kl_control import KlControlConfig, KlController
from megadapo.config import load_config
from megadapo.run.gpu_sharing import GpuSharing
from megadapo.run.processes import trainer_settings
from megadapo.run.workers import Workers
from megadapo.trainer.types import ReferenceKl
from tests.support import REPOSITORY
from tests.support.trainer.batches import random_batch
from tests.unit.run.test_step_metrics import UPDATE


def test_steps_that_warm_the_critic_up_leave_the_kl_coefficient_alone() -> None:
    """The policy stays where it is, its KL divergence is 0, and each step would lower it."""
    kl = ReferenceKl(mean=0.0)
    results = [replace(UPDATE, lr=lr, kl=kl) for lr in (0.0, 0.0, 1e-6)]
    controller = KlController(KlControlConfig(target=0.1, horizon=100), 0.02)
    workers: Any = Workers(
        trainer=SimpleNamespace(update=lambda *_, **__: results.pop(0)),  # type: ignore[arg-type]
        rollouts=SimpleNamespace(policy_version=7),  # type: ignore[arg-type]
        tokenizer=None,  # type: ignore[arg-type]
        kl_controller=controller,
        gpus=GpuSharing(SimpleNamespace()),  # type: ignore[arg-type]
    )
    coefs = []
    for step in (1, 2, 3):
        workers.update(random_batch([5] * 10), step)
        coefs.append(controller.coef)
    assert coefs == [0.02, 0.02, pytest.approx(0.02 * (1 - 0.2 * 10 / 100))]


def test_ranks_find_the_model_from_wherever_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a relative path that is looked for in the folder where another node's Ray began, and
    a name on the Hub that is taken for a folder."""
    monkeypatch.chdir(REPOSITORY)
    recipe = REPOSITORY / "configs" / "quickstart.toml"
    settings = trainer_settings(load_config(recipe))
    assert settings.model.path == str(REPOSITORY / "configs" / "quickstart-base")
    elsewhere = trainer_settings(load_config(recipe, ["model.path=some/name"]))
    assert elsewhere.model.path == "some/name"
