"""Advantages of tokens that several responses share, against numbers worked by hand."""

import numpy as np
import pytest

from megadapo.algorithm.advantages import advantages, average_shared_tokens, group_advantages
from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.groups import Branch
from tests.support.trainer.batches import scored_group


def test_shared_tokens_get_mean_advantage():
    """0 and 1 begin at the prompt; 2 leaves 0 behind 2 tokens, 3 leaves 2 behind 3, 4 leaves 0
    behind 1. Response 1 has equal tokens by chance and shares none."""
    branches = [None, None, Branch(0, 2), Branch(2, 3), Branch(0, 1)]
    found = average_shared_tokens([1.0, -2.0, 3.0, 5.0, -1.0], [4, 3, 5, 3, 2], branches)
    all_four, three, two = (1 + 3 + 5 - 1) / 4, (1 + 3 + 5) / 3, (3 + 5) / 2
    expected = [
        [all_four, three, 1, 1],
        [-2, -2, -2],
        [all_four, three, two, 3, 3],
        [all_four, three, two],
        [all_four, -1],
    ]
    for own, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-15)


def test_one_correct_and_two_incorrect_with_shared_prefix():
    values = group_advantages([1.0, 0.0, 0.0])
    branches = [None, Branch(0, 3), Branch(0, 3)]
    hard = average_shared_tokens(values, [10, 11, 11], branches)
    for own, value in zip(hard, values, strict=True):
        np.testing.assert_allclose(own[:3], 0.0, atol=1e-15)
        np.testing.assert_allclose(own[3:], value, rtol=1e-15)


def test_hard_and_soft_advantages_have_equal_sums():
    """Without a clip, with equal weights, the sum is the gradient's factor: no copy may be lost."""
    source = np.random.default_rng(3)
    lengths, branches = [7], [None]
    for index in range(1, 12):
        parent = int(source.integers(index))
        shared = int(source.integers(1, lengths[parent] + 1))
        branches.append(Branch(parent, shared))
        lengths.append(shared + int(source.integers(0, 5)))
    values = source.normal(size=12)
    hard = average_shared_tokens(values, lengths, branches)
    assert [len(own) for own in hard] == lengths
    assert sum(own.sum() for own in hard) == pytest.approx(np.repeat(values, lengths).sum())


def test_advantages_of_tokens_are_averaged_token_by_token():
    own = [np.array([1.0, 2.0, 3.0]), np.array([5.0, -4.0])]
    found = average_shared_tokens(own, [3, 2], [None, Branch(0, 2)])
    assert [one.tolist() for one in found] == [[3.0, -1.0, 3.0], [3.0, -1.0]]


def step_advantages(groups, rewards, **changes):
    config = AlgorithmConfig(normalize_by_std=False, **changes)
    return advantages(groups, config, max_response_tokens=99, rewards=np.array(rewards))


def test_groups_of_a_step_are_spread_in_order():
    groups = [scored_group([2, 3], branches=[None, Branch(0, 1)]), scored_group([1, 1])]
    rewards = [1.0, -1.0, 2.0, 0.0]
    assert step_advantages(groups, rewards).tolist() == [1.0, -1.0, 1.0, -1.0]
    hard = step_advantages(groups, rewards, shared_prefix="hard")
    assert [own.tolist() for own in hard] == [[0, 1], [0, -1, -1], [1], [-1]]


@pytest.mark.parametrize(("filtering", "shared"), [(True, 1.0), (False, 0.0)])
def test_responses_left_out_of_the_loss_do_not_enter_the_mean(filtering, shared):
    branches = [None, Branch(0, 2), Branch(0, 2)]
    one = scored_group([3, 3, 4], branches=branches, truncated=[False, False, True])
    changes = {"overlong_filtering": filtering, "overlong_buffer": 0}
    found = step_advantages([one], [2.0, 0.0, -2.0], shared_prefix="hard", **changes)
    first, second, cut = (own.tolist() for own in found)
    assert (first, second) == ([shared, shared, 2.0], [shared, shared, 0.0])
    assert cut == ([-2.0] * 4 if filtering else [0.0, 0.0, -2.0, -2.0])
