"""Updates of a step, and the settings of the trainer."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megadapo.algorithm.config import PretrainingConfig
from megadapo.algorithm.kl_control import KlControlConfig, KlController
from megadapo.config import load_config
from megadapo.run.gpu_sharing import GpuSharing
from megadapo.run.processes import trainer_settings
from megadapo.run.step.training import StepTrainer
from tests.support import REPOSITORY
from tests.support.runs.step_results import UPDATE
from tests.support.trainer.batches import random_batch


def test_critic_warmup_keeps_kl_coefficient() -> None:
    """Observing a divergence of 0 while the policy does not change would lower it."""
    results = [
        replace(UPDATE, metrics=UPDATE.metrics | {"policy/lr": lr, "kl/mean": 0.0})
        for lr in (0.0, 0.0, 1e-6)
    ]
    controller = KlController(KlControlConfig(target=0.1, horizon=100), 0.02)
    ranks: Any = SimpleNamespace(update=lambda *_, **__: results.pop(0))
    trainer = StepTrainer(
        ranks, GpuSharing(ranks), kl_controller=controller, pretraining=PretrainingConfig()
    )
    batch = random_batch([5] * 10)
    coefs = []
    for step in (1, 2, 3):
        trainer.update(batch, step)
        coefs.append(controller.coef)
    assert coefs == [0.02, 0.02, pytest.approx(0.02 * (1 - 0.2 * 10 / 100))]


def test_model_path_is_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray starts in another folder on other nodes; names on the Hub must not become paths."""
    monkeypatch.chdir(REPOSITORY)
    recipe = REPOSITORY / "configs" / "quickstart.toml"
    settings = trainer_settings(load_config(recipe))
    assert settings.model.path == str(REPOSITORY / "configs" / "quickstart-base")
    elsewhere = trainer_settings(load_config(recipe, ["model.path=some/name"]))
    assert elsewhere.model.path == "some/name"
