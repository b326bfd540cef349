"""Group advantages, shaping and selection against the formulas of the papers."""

import numpy as np
import pytest

from megadapo.algorithm.advantages import (
    advantages,
    group_advantages,
    is_mixed,
    response_advantages,
    whitened,
)
from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.loss_weights import loss_weights
from megadapo.algorithm.shaping import overlong_penalty, shaped_rewards
from tests.support.trainer.batches import scored_group


@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_step_advantages_use_shaped_rewards_of_each_group(normalize_by_std):
    groups = [
        scored_group([10, 20, 15], rewards=[1.0, -1.0, -1.0]),
        scored_group([1, 1], rewards=[-1.0, 1.0]),
        scored_group([1, 1], rewards=[1.0, 1.0]),
    ]
    config = AlgorithmConfig(
        overlong_buffer=10, overlong_factor=0.5, normalize_by_std=normalize_by_std
    )
    shaped = [np.array([1.0, -1.5, -1.25]), np.array([-1.0, 1.0]), np.array([1.0, 1.0])]
    expected = [group_advantages(one, normalize_by_std=normalize_by_std) for one in shaped]
    result = advantages(groups, config, max_response_tokens=20)
    np.testing.assert_allclose(result, np.concatenate(expected), rtol=1e-15)


@pytest.mark.parametrize(
    ("rule", "rewards", "expected"),
    [
        ("grpo", [1, -1, -1, -1], [1.5, -0.5, -0.5, -0.5]),
        ("grpo", [1, 1, -1, -1], [0.866025404, 0.866025404, -0.866025404, -0.866025404]),
        ("rloo", [1, -1, -1, -1], [2, -2 / 3, -2 / 3, -2 / 3]),
        ("rloo", [1, 1, -1, -1], [4 / 3, 4 / 3, -4 / 3, -4 / 3]),
        ("rloo", [3.0, 1.0], [2.0, -2.0]),
        ("maxrl", [1, -1, -1, -1], [3.0, -1.0, -1.0, -1.0]),
        ("maxrl", [1, 0, 1, 0], [1.0, -1.0, 1.0, -1.0]),
        ("reinforce++", [1, -1, 0.5], [1.0, -1.0, 0.5]),
        ("reinforce++-baseline", [1, -1, -1, -1], [1.5, -0.5, -0.5, -0.5]),
    ],
)
def test_rules_on_one_group(rule, rewards, expected):
    np.testing.assert_allclose(group_advantages(rewards, rule=rule), expected, rtol=1e-9)


@pytest.mark.parametrize("rule", ["grpo", "rloo", "maxrl", "reinforce++-baseline"])
@pytest.mark.parametrize("rewards", [[1.0], [-1.0] * 16, [0.0, 0.0]])
def test_equal_rewards_have_zero_advantages(rule, rewards):
    """Catches NaN: of a group of one (RLOO has no others), or a mean of 0 (MaxRL's divisor)."""
    assert (group_advantages(rewards, rule=rule) == 0.0).all()


@pytest.mark.parametrize("rewards", [[1.0, 0.0, -1.0], [2.0, 1.0], [1.0, -0.5]])
def test_maxrl_rejects_other_rewards(rewards):
    with pytest.raises(ValueError, match="1 and 0, or 1 and -1"):
        group_advantages(rewards, rule="maxrl")


def test_whitening_counts_tokens_in_the_loss():
    """Compared with every token's value written out; the truncated response is not counted."""
    groups = [
        scored_group([3, 1], rewards=[1.0, -1.0]),
        scored_group([2, 7], rewards=[1.0, 5.0], truncated=[False, True]),
    ]
    for rule, third in (("reinforce++", 1.0), ("reinforce++-baseline", -2.0)):
        config = AlgorithmConfig(advantage=rule, overlong_buffer=0, overlong_filtering=True)
        tokens = np.array([1.0, 1, 1, -1, third, third])
        expected = (np.array([1.0, -1.0, third]) - tokens.mean()) / tokens.std(ddof=1)
        found = advantages(groups, config, max_response_tokens=20)
        np.testing.assert_allclose(found[:3], expected, rtol=1e-12)
        assert np.isfinite(found).all()


@pytest.mark.parametrize("num_tokens", [[4, 4], [0, 0], [1, 0]])
def test_whitening_of_equal_or_no_values_is_zero(num_tokens):
    assert (whitened(np.array([0.3, 0.3]), np.array(num_tokens)) == 0.0).all()


def test_nearly_constant_group_keeps_unit_scale():
    """An epsilon under the fraction would shrink the advantages of small differences."""
    values = group_advantages([0.0, 1e-7, 0.0, 1e-7])
    assert values.std(ddof=1) == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("rewards", [[], [1.0, np.nan], [1.0, np.inf], [[1.0], [2.0]]])
def test_bad_rewards_are_rejected(rewards):
    with pytest.raises(ValueError):
        group_advantages(rewards)


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (30000, -1.0)],
)
def test_overlong_penalty_at_the_papers_lengths(length, penalty):
    assert overlong_penalty(length, max_length=20480, buffer=4096) == pytest.approx(penalty)
    assert overlong_penalty(length, max_length=10, buffer=0) == 0.0


def test_penalty_is_added_to_reward():
    group = scored_group([10, 20, 15], rewards=[1.0, -1.0, 1.0])
    config = AlgorithmConfig(overlong_buffer=10, overlong_factor=0.5)
    shaped = shaped_rewards(group, config, max_response_tokens=20)
    np.testing.assert_allclose(shaped, [1.0, -1.5, 0.75])


@pytest.mark.parametrize(
    ("correct", "kept"),
    [([True, False], True), ([True, True], False), ([False] * 3, False), ([True], False)],
)
def test_is_mixed(correct, kept):
    assert is_mixed(correct) is kept


@pytest.mark.parametrize("rule", ["grpo", "rloo", "reinforce++-baseline"])
def test_rounding_does_not_make_rewards_different(rule):
    """0.1 + 0.2 and 0.3 differ in the last bit, which a standard deviation makes advantages of."""
    rewards = np.array([0.1 + 0.2, 0.3, 0.3, 0.3])
    found = response_advantages(rewards, [4], np.full(4, 5), rule=rule, normalize_by_std=True)
    assert rewards[0] != rewards[1] and found.tolist() == [0.0] * 4
    # the mean of equal numbers may be another one
    assert (group_advantages([0.1 + 0.2] * 3, rule=rule) == 0.0).all()
    near = np.array([0.3 + 1e-9, 0.3, 0.3, 0.3])
    assert response_advantages(near, [4], np.full(4, 5), rule=rule, normalize_by_std=True).any()


def test_filtering_leaves_the_punishment_of_complete_responses():
    """With both, a complete correct response inside the buffer is punished, and a truncated one has
    no loss: the two rules reach different responses."""
    group = scored_group([40, 48, 10], rewards=[1.0, -1.0, 1.0], truncated=[False, True, False])
    config = AlgorithmConfig(overlong_filtering=True, overlong_buffer=16, normalize_by_std=False)
    rewards = shaped_rewards(group, config, max_response_tokens=48)
    assert rewards.tolist() == [0.5, -2.0, 1.0]
    found = advantages([group], config, max_response_tokens=48)
    np.testing.assert_allclose(found, rewards - rewards.mean(), rtol=1e-15)
    assert loss_weights([group], config).tolist() == [1 / 50, 0.0, 1 / 50]
