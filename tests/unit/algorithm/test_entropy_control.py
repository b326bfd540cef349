"""The coefficient of the entropy bonus under a target."""

import json
import math
from collections.abc import Iterator

import numpy as np
import pytest

from megadapo.algorithm.entropy_control import EntropyControlConfig, EntropyController

CONFIG = EntropyControlConfig(target=0.3, delta=0.0625, coef_max=0.5)


def trl(entropies: list[float], *, coef: float, config: EntropyControlConfig) -> Iterator[float]:
    """Yield the coefficient that TRL 1.10 applies in each step, of the smallest coefficient 0.

    Rule of grpo_trainer.py: the coefficient moves after every step, and acts only if the entropy of
    the step before was at or below the target.
    """
    last = math.inf
    for entropy in entropies:
        yield coef if last <= config.target else 0.0
        change = config.delta if entropy <= config.target else -config.delta
        coef = min(max(coef + change, 0.0), config.coef_max)
        last = entropy


@pytest.mark.parametrize("coef", [0.0, 0.01, 0.4])
@pytest.mark.parametrize("center", [0.2, 0.3, 0.4])
def test_coefficient_equals_trl_in_every_step(coef, center):
    """Also at both limits, and exactly at the target."""
    walk = center + np.cumsum(np.random.default_rng(5).normal(0.0, 0.03, 200))
    entropies = [*np.abs(walk).tolist(), *[0.3] * 12, *[0.31] * 12, 0.3, 0.3]
    controller = EntropyController(CONFIG, coef)
    found = []
    for entropy in entropies:
        found.append(controller.coef)
        controller.observe(entropy)
    assert found == list(trl(entropies, coef=coef, config=CONFIG))
    assert 0.5 in found and 0.0 in found


@pytest.mark.parametrize("entropy", [None, math.nan, math.inf])
def test_step_without_finite_entropy_is_ignored(entropy):
    controller = EntropyController(CONFIG, 0.1)
    controller.observe(0.1)
    before = controller.state_dict()
    controller.observe(entropy)
    assert controller.state_dict() == before and controller.coef == 0.1625


def test_coefficient_is_constant_without_target():
    controller = EntropyController(EntropyControlConfig(), 0.05)
    controller.observe(0.0)
    controller.load_state_dict({"coef": 0.7, "entropy": 0.1})
    assert (controller.coef, controller.state_dict()) == (0.05, {})


def test_state_survives_a_checkpoint():
    """Without the last entropy the bonus would be off in the first step after a resume."""
    controller = EntropyController(CONFIG, 0.05)
    controller.load_state_dict({})
    controller.observe(0.123)
    resumed = EntropyController(CONFIG, 0.05)
    resumed.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    assert resumed.coef == controller.coef == 0.1125
