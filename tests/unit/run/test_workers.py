"""The order in which trainer and engines use the memory that they share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megadapo.algorithm.kl_control import KlControlConfig, KlController
from megadapo.config import load_config
from megadapo.run.processes import trainer_settings
from megadapo.run.workers import Workers
from megadapo.trainer.types import ReferenceKl
from tests.support import REPOSITORY
from tests.support.trainer.batches import random_batch
from tests.unit.run.test_step_metrics import UPDATE


class Calls:
    """Writes down, in one list with others, which of its methods are called."""

    policy_version = 7

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        def call(*_: object, **keys: object) -> None:
            self._seen.append(" ".join([name, *(f"{key}={keys[key]}" for key in keys)]))

        return call


@pytest.mark.parametrize("engines_sleep", [True, False])
def test_engines_sleep_while_a_checkpoint_is_made(engines_sleep: bool) -> None:
    """Catches a save that needs the memory which engines on the same GPUs hold, and weights that
    are sent a second time though they have not changed."""
    seen: list[str] = []
    workers: Any = Workers(
        trainer=Calls(seen),  # type: ignore[arg-type]
        rollouts=Calls(seen),  # type: ignore[arg-type]
        tokenizer=None,  # type: ignore[arg-type]
        kl_controller=None,  # type: ignore[arg-type]
        engines_sleep=engines_sleep,
    )
    workers.begin_save(Path("state"))
    expected = ["sleep keep_weights=True", "begin_save", "wake"]
    assert seen == (expected if engines_sleep else ["begin_save"])


def test_steps_that_warm_the_critic_up_leave_the_kl_coefficient_alone() -> None:
    """The policy stays where it is, its KL divergence is 0, and each step would lower it."""
    kl = ReferenceKl(mean=0.0)
    results = [replace(UPDATE, lr=lr, kl=kl) for lr in (0.0, 0.0, 1e-6)]
    controller = KlController(KlControlConfig(target=0.1, horizon=100), 0.02)
    workers: Any = Workers(
        trainer=SimpleNamespace(update=lambda *_, **__: results.pop(0)),  # type: ignore[arg-type]
        rollouts=Calls([]),  # type: ignore[arg-type]
        tokenizer=None,  # type: ignore[arg-type]
        kl_controller=controller,
        engines_sleep=False,
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
