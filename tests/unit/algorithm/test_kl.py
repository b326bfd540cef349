"""KL divergence in the reward, for every rule, and the coefficient that a controller sets."""

import json
import math
from typing import Any

import numpy as np
import pytest

from megadapo.algorithm.advantages import advantages_with_kl
from megadapo.algorithm.kl_control import KlControlConfig, KlController

KL = np.array([0.2, -0.1, 0.4, 0.3, 0.0, 0.5, 0.1])
NUM_TOKENS = np.array([2, 1, 0, 4])
"""The third response has no token in the loss; it still counts in its group."""
REWARDS = np.array([1.0, -1.0, -1.0, 1.0])
PAID = np.array([1.0 - 0.01, -1.0 - 0.04, -1.0, 1.0 - 0.09])
"""Reward of each response less 0.1 of its KL divergence."""
OTHERS = PAID[[1, 0, 3, 2]]
CONFIG = KlControlConfig(target=0.1, horizon=10_000)


def found(rule: str, *, kl: np.ndarray = KL, kl_coef: float = 0.1, **changes: Any) -> np.ndarray:
    usual: dict[str, Any] = {"num_tokens": NUM_TOKENS, "group_sizes": [2, 2]}
    return advantages_with_kl(
        REWARDS, kl, kl_coef=kl_coef, rule=rule, normalize_by_std=True, **(usual | changes)
    )


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("rloo", np.repeat(PAID - OTHERS, NUM_TOKENS)),
        # a token is credited with the KL divergence behind it
        ("reinforce++", np.array([0.99, 1.01, -1.04, 0.91, 0.94, 0.94, 0.99])),
        ("reinforce++-baseline", np.repeat((PAID - OTHERS) / 2, NUM_TOKENS)),
    ],
)
def test_kl_is_paid_by_the_rule(rule, expected):
    if rule != "rloo":
        expected = (expected - expected.mean()) / expected.std(ddof=1)
    np.testing.assert_allclose(found(rule), expected, rtol=1e-12)


@pytest.mark.parametrize("rule", ["grpo", "rloo", "reinforce++", "reinforce++-baseline"])
def test_zero_kl_does_not_change_advantages(rule):
    zero = found(rule, kl=np.zeros_like(KL))
    np.testing.assert_array_equal(zero, found(rule, kl_coef=0.0))
    assert np.isfinite(zero).all() and zero.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("rule", ["grpo", "reinforce++"])
def test_nan_kl_makes_all_advantages_nan(rule, bad):
    kl = KL.copy()
    kl[3] = bad
    assert np.isnan(found(rule, kl=kl)).all()


def test_step_without_tokens_has_no_advantages():
    nothing = found("reinforce++", kl=np.empty(0), num_tokens=np.zeros(4, dtype=np.int64))
    assert nothing.shape == (0,)


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


@pytest.mark.parametrize(
    ("kl", "coef"),
    # 1.5 x 0.01 and 0.01 / 1.5 are not yet outside; k1 may be negative
    [(0.02, 0.6), (0.015, 0.3), (0.01, 0.3), (0.00667, 0.3), (0.0066, 0.15), (-0.1, 0.15)],
)
def test_coefficient_doubles_and_halves(kl, coef):
    """PPO's rule (arXiv 1707.06347, section 4), in the loss and in the reward."""
    for config in (
        KlControlConfig(old_target=0.01).of_old_policy,
        KlControlConfig(target=0.01, rule="doubling"),
    ):
        controller = KlController(config, 0.3)
        controller.observe(kl, 512)
        assert controller.coef == coef
    fixed = KlController(KlControlConfig(target=0.01).of_old_policy, 0.3)
    fixed.observe(kl, 512)
    assert fixed.coef == 0.3


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
