"""The adaptive KL coefficient: its update by a step, and its state in a checkpoint."""

from __future__ import annotations

import json
import math

import pytest

from megadapo.algorithm.kl_control import KlControlConfig, KlController, controlled_coef

CONFIG = KlControlConfig(target=0.1, horizon=10_000)


def by_definition(coef: float, divergences: list[float], num_responses: int) -> list[float]:
    """Return the coefficient after each step by arXiv 1909.08593, section 2.2."""
    coefs = []
    for kl in divergences:
        error = (kl - 0.1) / 0.1
        error = -0.2 if error < -0.2 else 0.2 if error > 0.2 else error
        coef = coef * (1 + num_responses / 10_000 * error)
        coefs.append(coef)
    return coefs


def test_coefficient_matches_definition() -> None:
    """KL on, above and below the target, inside and outside the clamp, and negative (k1)."""
    divergences = [0.1, 0.11, 0.09, 0.5, 0.0, -0.3, 0.121]
    controller, found = KlController(CONFIG, 0.05), []
    for kl in divergences:
        controller.observe(kl, 512)
        found.append(controller.coef)
    assert found == pytest.approx(by_definition(0.05, divergences, 512), rel=1e-12)
    assert found[0] == pytest.approx(0.05, rel=1e-15)


def test_worked_numbers() -> None:
    """256 responses of a horizon of 1,000 at an error of +0.1, and at +1 which the clamp cuts."""
    config = KlControlConfig(target=0.2, horizon=1_000)
    assert controlled_coef(0.3, 0.22, 256, config) == pytest.approx(0.3 * 1.0256)
    assert controlled_coef(0.3, 0.4, 256, config) == pytest.approx(0.3 * 1.0512)


def test_coefficient_grows_by_the_horizon() -> None:
    """A controller that forgot the number of responses would depend on the batch's size."""
    for num_responses in (10, 100):
        coef = 1.0
        for _ in range(10_000 // num_responses):
            coef = controlled_coef(coef, 1.0, num_responses, CONFIG)
        assert coef == pytest.approx(math.exp(0.2), rel=1e-3)


@pytest.mark.parametrize("kl", [None, math.nan, math.inf, -math.inf])
def test_step_without_finite_kl_is_ignored(kl: float | None) -> None:
    """One NaN would stay in the coefficient for the rest of the run."""
    controller = KlController(CONFIG, 0.05)
    controller.observe(kl, 512)
    assert controller.coef == 0.05


def test_coefficient_is_constant_without_target() -> None:
    controller = KlController(KlControlConfig(), 0.05)
    controller.observe(3.0, 512)
    assert controller.coef == 0.05
    assert controller.state_dict() == {}


def test_coefficient_survives_checkpoint() -> None:
    """The coefficient passes through a checkpoint's JSON."""
    controller = KlController(CONFIG, 0.05)
    controller.observe(0.123, 300)
    resumed = KlController(CONFIG, 0.05)
    resumed.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    assert resumed.coef == controller.coef != 0.05


def test_checkpoint_without_coefficient_uses_config() -> None:
    """A state with a coefficient does not change a run without a target."""
    controller = KlController(CONFIG, 0.05)
    controller.load_state_dict({})
    fixed = KlController(KlControlConfig(), 0.03)
    fixed.load_state_dict({"coef": 0.7})
    assert (controller.coef, fixed.coef) == (0.05, 0.03)
