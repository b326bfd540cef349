"""Every loss aggregation as weights: against its definition, written out with loops."""

import typing

import numpy as np
import pytest

from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.loss_weights import Aggregation, loss_weights, sequence_weights
from tests.support.trainer.batches import scored_group

LENGTHS = np.array([3, 1, 7, 2, 5])
LOSS_LENGTH = 11
GROUPS = np.array([8, 8, 3, 3, 3])
LOSSES = [np.random.default_rng(i).normal(size=n) for i, n in enumerate(LENGTHS)]


def by_definition(aggregation: Aggregation, losses: list[np.ndarray], groups: np.ndarray) -> float:
    by_group = [
        np.concatenate([x for x, g in zip(losses, groups, strict=True) if g == group])
        for group in sorted(set(groups))
    ]
    means, sums = [x.mean() for x in losses], [x.sum() for x in losses]
    return {
        "token-mean": np.concatenate(losses).mean(),
        "group-token-mean": np.mean([x.mean() for x in by_group]),
        "seq-mean-token-mean": np.mean(means),
        "seq-mean-token-sum": np.mean(sums),
        "seq-mean-token-sum-norm": np.mean(sums) / LOSS_LENGTH,
        "seq-sum-token-mean": np.sum(means),
        "token-sum": np.sum(sums),
    }[aggregation]


@pytest.mark.parametrize("aggregation", typing.get_args(Aggregation))
@pytest.mark.parametrize("keep", [None, [True, False, True, True, False]])
def test_weighted_sum_is_the_aggregation(aggregation, keep):
    keep = None if keep is None else np.array(keep)
    weights = sequence_weights(LENGTHS, GROUPS, aggregation, keep=keep, loss_length=LOSS_LENGTH)
    total = sum(w * x.sum() for w, x in zip(weights, LOSSES, strict=True))
    chosen = np.flatnonzero(np.ones(5, bool) if keep is None else keep)
    expected = by_definition(aggregation, [LOSSES[i] for i in chosen], GROUPS[chosen])
    assert total == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("aggregation", typing.get_args(Aggregation))
def test_no_kept_response_gives_zero_weights(aggregation):
    keep = np.zeros(5, bool)
    weights = sequence_weights(LENGTHS, GROUPS, aggregation, keep=keep, loss_length=LOSS_LENGTH)
    assert (weights == 0).all()
    empty = sequence_weights(np.array([], int), np.array([], int), aggregation)
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


def test_unknown_aggregation_is_rejected():
    with pytest.raises(ValueError, match="token-mode"):
        sequence_weights(LENGTHS, GROUPS, "token-mode")
