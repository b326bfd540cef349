"""Loss aggregations as weights, against loops, and the mini-batches that they are computed for."""

import itertools
import math
import random
import typing

import numpy as np
import pytest

from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.loss_weights import Aggregation, loss_weights, sequence_weights
from megadapo.algorithm.mini_batches import (
    mini_batch_sizes,
    mini_batches,
    spread_stale,
    update_order,
)
from tests.support.trainer.batches import scored_group

LENGTHS = np.array([3, 1, 7, 2, 5])
LOSS_LENGTH = 11
GROUPS = np.array([8, 8, 3, 3, 3])
SIGNS = np.array([1, -1, -1, 0, -1])
EXPONENT = 0.75
LOSSES = [np.random.default_rng(i).normal(size=n) for i, n in enumerate(LENGTHS)]
SIGN_OF = {id(losses): sign for losses, sign in zip(LOSSES, SIGNS, strict=True)}
NUMBERS = {"loss_length": LOSS_LENGTH, "length_exponent": EXPONENT, "signs": SIGNS}


def balanced(losses: list[np.ndarray]) -> float:
    """A group's mean over its signs of the mean token, by their responses (arXiv 2605.04077)."""
    shares = [
        len(part) / len(losses) * np.concatenate(part).mean()
        for sign in (1, -1, 0)
        if (part := [x for x in losses if SIGN_OF[id(x)] == sign])
    ]
    return sum(shares)


def by_definition(aggregation: Aggregation, losses: list[np.ndarray], groups: np.ndarray) -> float:
    in_groups = [
        [x for x, g in zip(losses, groups, strict=True) if g == group]
        for group in sorted(set(groups))
    ]
    by_group = [np.concatenate(own) for own in in_groups]
    means, sums = [x.mean() for x in losses], [x.sum() for x in losses]
    powers = [float(len(x)) ** -EXPONENT for x in losses]
    return {
        "token-mean": np.concatenate(losses).mean(),
        "group-token-mean": np.mean([x.mean() for x in by_group]),
        "seq-mean-token-mean": np.mean(means),
        "seq-mean-token-sum": np.mean(sums),
        "seq-mean-token-sum-norm": np.mean(sums) / LOSS_LENGTH,
        "seq-sum-token-mean": np.sum(means),
        "token-sum": np.sum(sums),
        "vl": np.dot(powers, sums) / (LOSS_LENGTH * np.sum(powers)),
        "balanced": np.mean([balanced(own) for own in in_groups]),
    }[aggregation]


@pytest.mark.parametrize("aggregation", typing.get_args(Aggregation))
@pytest.mark.parametrize("keep", [None, [True, False, True, True, False]])
def test_weighted_sum_is_the_aggregation(aggregation, keep):
    keep = None if keep is None else np.array(keep)
    weights = sequence_weights(LENGTHS, GROUPS, aggregation, keep=keep, **NUMBERS)
    total = sum(w * x.sum() for w, x in zip(weights, LOSSES, strict=True))
    chosen = np.flatnonzero(np.ones(5, bool) if keep is None else keep)
    expected = by_definition(aggregation, [LOSSES[i] for i in chosen], GROUPS[chosen])
    assert total == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("aggregation", typing.get_args(Aggregation))
def test_no_kept_response_gives_zero_weights(aggregation):
    keep = np.zeros(5, bool)
    weights = sequence_weights(LENGTHS, GROUPS, aggregation, keep=keep, **NUMBERS)
    assert (weights == 0).all()
    nothing = np.array([], int)
    empty = sequence_weights(nothing, nothing, aggregation, **NUMBERS | {"signs": nothing})
    assert empty.shape == (0,)


@pytest.mark.parametrize("keep", [None, np.array([True, True])])
def test_empty_response_has_zero_weight(keep):
    """1 / len of an empty response would be infinite."""
    weights = sequence_weights(np.array([0, 4]), np.array([0, 0]), "seq-mean-token-mean", keep=keep)
    assert weights.tolist() == [0.0, 0.25]


@pytest.mark.parametrize(
    "filtering, expected", [(False, [1 / 6, 1 / 6, 1 / 5]), (True, [1 / 2, 0.0, 1 / 5])]
)
def test_overlong_filtering_removes_truncated_responses(filtering, expected):
    groups = [scored_group([2, 4], truncated=[False, True]), scored_group([5])]
    config = AlgorithmConfig(
        responses_per_mini_batch=2, overlong_buffer=0, overlong_filtering=filtering
    )
    np.testing.assert_allclose(loss_weights(groups, config), expected, rtol=1e-15)


def test_degenerate_filtering_removes_gibberish_and_repetitive_responses():
    """A response without log-probs is kept, and so is one at a bound."""
    groups = [
        scored_group([2, 2], mean_logprobs=[-3.0, -3.1]),
        scored_group([2, 1, 2], repetitions=[0.6, 0.5, 0.0], mean_logprobs=[-1, math.nan, -9.0]),
    ]
    off = AlgorithmConfig(responses_per_mini_batch=8)
    assert loss_weights(groups, off).tolist() == [1 / 9] * 5
    on = AlgorithmConfig(responses_per_mini_batch=8, degenerate_filtering=True)
    assert loss_weights(groups, on).tolist() == [1 / 3, 0.0, 0.0, 1 / 3, 0.0]


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("token-mean", [1 / 15] * 4),
        ("group-token-mean", [0.1, 0.1, 0.05, 0.05]),
        ("seq-mean-token-mean", [0.125, 1 / 12, 1 / 16, 1 / 24]),
    ],
)
def test_weights_of_two_groups(aggregation, weights):
    found = sequence_weights(np.array([2, 3, 4, 6]), np.array([0, 0, 1, 1]), aggregation)
    np.testing.assert_allclose(found, weights, rtol=1e-15)


def test_loss_length_reaches_weights():
    """Dr. GRPO's divisor is the configured length, not the longest response."""
    config = AlgorithmConfig(loss_aggregation="seq-mean-token-sum-norm", loss_length=50)
    assert loss_weights([scored_group([2, 4])], config).tolist() == [0.01, 0.01]


@pytest.mark.parametrize(
    ("exponent", "weights"),
    [
        # 1 / (10 (1/2 + 1/8) 2) and a quarter of it; in the middle sqrt(1/4) as much; Dr. GRPO
        (1.0, [0.08, 0.02]),
        (0.5, [1 / 15, 1 / 30]),
        (0.0, [0.05, 0.05]),
    ],
)
def test_vl_by_hand(exponent, weights):
    found = sequence_weights(
        np.array([2, 8]), np.zeros(2), "vl", loss_length=10, length_exponent=exponent
    )
    np.testing.assert_allclose(found, weights, rtol=1e-15)


def test_vl_has_the_smallest_variance_of_all_unbiased_weights():
    """A sum of n tokens' gradients with weights w has the variance w^2 n, up to a constant."""
    own = sequence_weights(LENGTHS, GROUPS, "vl", loss_length=LOSS_LENGTH)
    assert own.sum() == pytest.approx(1 / LOSS_LENGTH, rel=1e-15)
    smallest = (own**2 * LENGTHS).sum()
    moves = np.random.default_rng(0).normal(size=(100, 5)) * 1e-3
    for move in moves - moves.mean(axis=1, keepdims=True):
        assert ((own + move) ** 2 * LENGTHS).sum() > smallest


def test_balanced_by_hand():
    """One right answer of 2 tokens, two wrong ones of 3 and 7: 1/3 and 2/3 of the group's loss.

    By tokens the wrong ones would have 10/12 of it.
    """
    groups = [scored_group([2, 3, 7]), scored_group([5, 5])]
    config = AlgorithmConfig(loss_aggregation="balanced", responses_per_mini_batch=6)
    found = loss_weights(groups, config, advantages=np.array([2.0, -1.0, -1.0, 0.7, -0.7]))
    expected = [1 / 12, 1 / 30, 1 / 30, 1 / 20, 1 / 20]
    np.testing.assert_allclose(found, expected, rtol=1e-15)


def test_reward_at_the_mean_is_in_neither_part():
    """Its advantage is a rounding error, whose sign would make a part's tokens weigh less."""
    config = AlgorithmConfig(loss_aggregation="balanced", responses_per_mini_batch=3)
    options = [np.array([-1.0, middle, 1.0]) for middle in (0.0, -2.8e-16)]
    found = [loss_weights([scored_group([2, 9, 3])], config, advantages=one) for one in options]
    np.testing.assert_array_equal(*found)


def test_balanced_of_equal_lengths_is_the_mean_of_the_group():
    lengths, groups = np.full(6, 4), np.array([0, 0, 0, 0, 1, 1])
    found = sequence_weights(lengths, groups, "balanced", signs=np.array([1, -1, -1, 0, 1, 1]))
    np.testing.assert_allclose(
        found, sequence_weights(lengths, groups, "group-token-mean"), rtol=1e-15
    )


def test_unknown_aggregation_is_rejected():
    with pytest.raises(ValueError, match="token-mode"):
        sequence_weights(LENGTHS, GROUPS, "token-mode")


def test_full_step_has_planned_sizes():
    assert mini_batch_sizes(12, 4) == [4, 4, 4]
    assert [m.tolist() for m in mini_batches([2] * 4, 4)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("limit", [1, 3, 4, 32])
@pytest.mark.parametrize("num_groups", [0, 1, 2, 5, 9, 13, 33, 97])
def test_sizes_differ_by_at_most_one_group(num_groups, limit):
    """An update of one group would change the weights as much as one of thirty-two."""
    sizes = mini_batch_sizes(num_groups, limit)
    assert sum(sizes) == num_groups and len(sizes) == -(-num_groups // limit)
    assert not sizes or limit >= max(sizes) >= min(sizes) >= max(max(sizes) - 1, 1)


def test_no_group_is_cut():
    assert [m.tolist() for m in mini_batches([3] * 3, 6)] == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
    # a group that is larger than an update is one
    assert [m.tolist() for m in mini_batches([4, 4], 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mini_batches([], 4) == ()


def test_groups_are_planned_by_their_full_size():
    """Failures in every group would make larger updates, and fewer of them."""
    assert [len(members) for members in mini_batches([2] * 8, 8, planned=4)] == [4] * 4
    assert [len(members) for members in mini_batches([4, 4], 4, planned=2)] == [4, 4]


def test_indices_of_uneven_groups():
    found = mini_batches([1, 3, 2], 6)
    assert np.concatenate(found).tolist() == list(range(6))
    assert [len(m) for m in found] == [4, 2]


@pytest.mark.parametrize("is_stale", [[False] * 10, [True] * 10, []])
def test_spread_stale_keeps_order_of_uniform_groups(is_stale):
    """On-policy runs must keep their bits."""
    assert spread_stale(is_stale, 4) == list(range(len(is_stale)))


def test_stale_groups_are_spread_evenly():
    """At the front they would all be in the first update, where no clip acts."""
    source = random.Random(0)
    for num_groups, limit in itertools.product([1, 2, 5, 8, 13, 64], [1, 3, 4, 16]):
        for num_stale in {0, 1, num_groups // 3, num_groups // 2, num_groups}:
            is_stale = [True] * num_stale + [False] * (num_groups - num_stale)
            source.shuffle(is_stale)
            order = spread_stale(is_stale, limit)
            assert sorted(order) == list(range(num_groups))
            start = 0
            for size in mini_batch_sizes(num_groups, limit):
                members = order[start : start + size]
                share = sum(is_stale[index] for index in members)
                assert abs(share - size * num_stale / num_groups) <= 1.0
                start += size
            for kind in (True, False):
                of_kind = [index for index in order if is_stale[index] == kind]
                assert of_kind == sorted(of_kind)


def test_leading_stale_groups_are_spread():
    assert spread_stale([True, True, False, False, False, False], 3) == [0, 2, 3, 1, 4, 5]


def test_later_passes_have_orders_of_their_own():
    """The same order in each pass, step or run would correlate the updates; a lost one biases."""
    orders = {}
    for seed, step in itertools.product((0, 1), (1, 2)):
        order = update_order(8, 3, seed=seed, step=step)
        assert order == update_order(8, 3, seed=seed, step=step)
        assert order[:8] == update_order(8, 1, seed=seed, step=step) == list(range(8))
        assert sorted(order[8:16]) == sorted(order[16:]) == list(range(8))
        orders |= {tuple(order[8:16]): 1, tuple(order[16:]): 2}
    assert len(orders) == 8 and tuple(range(8)) not in orders
    assert (
        update_order(1, 4, seed=0, step=1) == [0] * 4 and update_order(0, 2, seed=0, step=1) == []
    )
