"""KL divergence in the reward: advantages of tokens for every rule."""

from __future__ import annotations

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


def test_rloo_subtracts_kl_of_all_tokens():
    paid = np.array([1.0 - 0.01, -1.0 - 0.04, -1.0, 1.0 - 0.09])
    per_response = [paid[0] - paid[1], paid[1] - paid[0], paid[2] - paid[3], paid[3] - paid[2]]
    np.testing.assert_allclose(found("rloo"), np.repeat(per_response, NUM_TOKENS), rtol=1e-12)


def test_reinforce_credits_tokens_with_later_kl():
    returns = np.array(
        [
            1.0 - 0.1 * (0.2 - 0.1),
            1.0 + 0.01,
            -1.0 - 0.04,
            1.0 - 0.1 * 0.9,
            1.0 - 0.1 * 0.6,
            1.0 - 0.1 * 0.6,
            1.0 - 0.01,
        ]
    )
    expected = (returns - returns.mean()) / returns.std(ddof=1)
    np.testing.assert_allclose(found("reinforce++"), expected, rtol=1e-12)


def test_reinforce_baseline_whitens_after_centring():
    paid = np.array([0.99, -1.04, -1.0, 0.91])
    centered = np.repeat(
        paid - np.repeat([(paid[0] + paid[1]) / 2, (paid[2] + paid[3]) / 2], 2), NUM_TOKENS
    )
    expected = (centered - centered.mean()) / centered.std(ddof=1)
    np.testing.assert_allclose(found("reinforce++-baseline"), expected, rtol=1e-12)


@pytest.mark.parametrize("rule", ["grpo", "rloo", "reinforce++", "reinforce++-baseline"])
def test_zero_kl_does_not_change_advantages(rule: str):
    zero = found(rule, kl=np.zeros_like(KL))
    np.testing.assert_array_equal(zero, found(rule, kl_coef=0.0))
    assert np.isfinite(zero).all() and zero.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("rule", ["grpo", "reinforce++"])
def test_nan_kl_makes_all_advantages_nan(rule: str, bad: float):
    kl = KL.copy()
    kl[3] = bad
    assert np.isnan(found(rule, kl=kl)).all()


def test_step_without_tokens_has_no_advantages():
    nothing = found("reinforce++", kl=np.empty(0), num_tokens=np.zeros(4, dtype=np.int64))
    assert nothing.shape == (0,)
