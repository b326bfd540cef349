"""KL divergence in the reward: advantages of tokens for every rule."""

from typing import Any

import numpy as np
import pytest

from megadapo.algorithm.advantages import advantages_with_kl

KL = np.array([0.2, -0.1, 0.4, 0.3, 0.0, 0.5, 0.1])
NUM_TOKENS = np.array([2, 1, 0, 4])
"""The third response has no token in the loss; it still counts in its group."""
REWARDS = np.array([1.0, -1.0, -1.0, 1.0])


def found(rule: str, *, kl: np.ndarray = KL, kl_coef: float = 0.1, **changes: Any) -> np.ndarray:
    usual: dict[str, Any] = {"num_tokens": NUM_TOKENS, "group_sizes": [2, 2]}
    return advantages_with_kl(
        REWARDS, kl, kl_coef=kl_coef, rule=rule, normalize_by_std=True, **(usual | changes)
    )


PAID = np.array([1.0 - 0.01, -1.0 - 0.04, -1.0, 1.0 - 0.09])
"""Reward of each response less 0.1 of its KL divergence."""
OTHERS = PAID[[1, 0, 3, 2]]


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
