"""The adaptive KL coefficient: its update by a step, and its state in a checkpoint."""

import json
import math

import pytest

from megadapo.algorithm.kl_control import KlControlConfig, KlController

CONFIG = KlControlConfig(target=0.1, horizon=10_000)


@pytest.mark.parametrize(
    ("kl", "error"),
    [(0.2, 0.0), (0.22, 0.1), (0.19, -0.05), (0.4, 0.2), (0.0, -0.2), (-0.3, -0.2)],
)
def test_coefficient_follows_the_clamped_error(kl, error):
    """256 responses of a horizon of 1,000 (arXiv 1909.08593, section 2.2); k1 may be negative."""
    controller = KlController(KlControlConfig(target=0.2, horizon=1_000), 0.3)
    controller.observe(kl, 256)
    assert controller.coef == pytest.approx(0.3 * (1 + 0.256 * error), rel=1e-12)


def test_coefficient_grows_by_the_horizon():
    """A controller that forgot the number of responses would depend on the batch's size."""
    for num_responses in (10, 100):
        controller = KlController(CONFIG, 1.0)
        for _ in range(10_000 // num_responses):
            controller.observe(1.0, num_responses)
        assert controller.coef == pytest.approx(math.exp(0.2), rel=1e-3)


@pytest.mark.parametrize("kl", [None, math.nan, math.inf, -math.inf])
def test_step_without_finite_kl_is_ignored(kl):
    """One NaN would stay in the coefficient for the rest of the run."""
    controller = KlController(CONFIG, 0.05)
    controller.observe(kl, 512)
    assert controller.coef == 0.05


def test_coefficient_is_constant_without_target():
    controller = KlController(KlControlConfig(), 0.05)
    controller.observe(3.0, 512)
    assert controller.coef == 0.05
    assert controller.state_dict() == {}


def test_coefficient_survives_checkpoint():
    controller = KlController(CONFIG, 0.05)
    controller.observe(0.123, 300)
    resumed = KlController(CONFIG, 0.05)
    resumed.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    assert resumed.coef == controller.coef != 0.05


def test_checkpoint_without_coefficient_uses_config():
    """A state with a coefficient does not change a run without a target."""
    controller = KlController(CONFIG, 0.05)
    controller.load_state_dict({})
    fixed = KlController(KlControlConfig(), 0.03)
    fixed.load_state_dict({"coef": 0.7})
    assert (controller.coef, fixed.coef) == (0.05, 0.03)
