"""From sums of mini-batches to the numbers of a step."""

import math

import numpy as np
import pytest

from megadapo.algorithm.bapo import BapoBounds
from megadapo.algorithm.importance import ImportanceConfig
from megadapo.trainer.critic.critic import CriticSums, summarize_critic
from megadapo.trainer.update.metrics import MiniBatchSums, summarize
from tests.support.runs.step_results import UPDATE, area


def sums(**changes: float) -> MiniBatchSums:
    usual = {
        "loss": 2.0,
        "num_tokens": 4.0,
        "entropy": 2.0,
        "ratio": 4.4,
        "clipped_low": 1.0,
        "clipped_high": 2.0,
        "token_probability": 1.0,
        "num_compared": 2.0,
        "logprob_difference": 0.5,
        "max_ratio_error": 0.0,
        "max_logprob_difference": 0.4,
    }
    return MiniBatchSums(**(usual | changes))


def step_of(mini_batches: list[MiniBatchSums], **changes):
    usual = {"grad_norms": [1.0], "lr": 1e-6, "num_mini_batches": len(mini_batches)}
    usual |= {"version_gaps": np.zeros(4, dtype=np.int32), "importance": ImportanceConfig()}
    usual |= {"num_left_out": None, "bounds": (), "kl_coef": 0.0}
    return summarize(mini_batches, **(usual | changes))


def test_means_are_over_tokens_not_over_mini_batches():
    later = sums(num_tokens=12.0, entropy=14.0, clipped_low=7.0, dual_clipped=4.0)
    result = step_of([sums(), later])
    assert result["policy/dual_clip_fraction"] == pytest.approx(0.25)
    assert result["policy/entropy"] == pytest.approx(1.0)
    assert result["policy/clip_low_fraction"] == pytest.approx(0.5)
    assert result["tokens/trained"] == 16
    assert result["policy/loss"] == pytest.approx(2.0)


def test_probability_of_clipped_tokens_is_a_mean_over_them():
    clipped = [sums(clipped_high_probability=0.5), sums(clipped_high=6, clipped_high_probability=1)]
    assert step_of(clipped)["policy/clip_high_probability"] == pytest.approx(1.5 / 8)
    assert step_of([sums(clipped_high=0.0)])["policy/clip_high_probability"] is None


def test_ratio_error_is_of_the_first_mini_batch():
    """Later ones see other weights; their ratio is meant to differ from 1."""
    for first, later in ((0.0, 0.3), (1e-7, 0.0)):
        result = step_of([sums(max_ratio_error=first), sums(max_ratio_error=later)])
        assert result["policy/ratio_first_max_error"] == first


def test_parity_mean_is_over_compared_tokens():
    result = step_of([sums(), sums(num_compared=0.0, logprob_difference=0.0)])
    assert result["parity/logprob_abs_mean"] == pytest.approx(0.25)
    result = step_of([sums(max_logprob_difference=0.1), sums(max_logprob_difference=0.7)])
    assert result["parity/logprob_abs_max"] == 0.7


def test_staleness_is_over_tokens_and_shares_over_weighted_tokens():
    stale = sums(num_stale=3.0, logprob_drift=0.6, max_logprob_drift=0.3, num_weighted=4.0)
    more = sums(num_stale=1.0, logprob_drift=0.6, max_logprob_drift=0.6, num_outside=1.0)
    gaps = np.array([0, 0, 0, 0, 1, 1, 3, 3])
    found = area(step_of([stale, more], version_gaps=gaps), "staleness")
    assert (found["token_share"], found["mean"], found["max"]) == (0.5, 1.0, 3)
    assert found["logprob_drift_mean"] == pytest.approx(0.3) and found["logprob_drift_max"] == 0.6
    assert (found["weight_truncated_share"], found["weight_masked_share"]) == (0.25, 0.0)
    mask = ImportanceConfig(bound="mask")
    found = area(step_of([stale, more], version_gaps=gaps, importance=mask), "staleness")
    assert (found["weight_truncated_share"], found["weight_masked_share"]) == (0.0, 0.25)


def test_unmeasured_numbers_are_null_or_nan():
    """0.0 would read as perfect parity, as a vanished gradient, or as a search that found 0."""
    assert step_of([sums()])["staleness/token_share"] == 0.0
    nothing = sums(num_tokens=0.0, num_compared=0.0, max_logprob_difference=0.0)
    result = step_of([nothing], grad_norms=[], version_gaps=np.empty(0, dtype=np.int32))
    for name in ("parity", "staleness", "bapo", "kl", "pretraining"):
        assert set(area(result, name).values()) == {None}
    assert math.isnan(result["policy/entropy"]) and math.isnan(result["policy/grad_norm"])
    assert result["policy/skipped_updates"] == 1 and result["tokens/trained"] == 0
    # a gradient that is not finite
    assert step_of([sums(gradient=math.nan)])["policy/positive_gradient_share"] is None


def test_searched_bounds_are_means_and_the_smallest_share():
    """Updates without tokens have no share."""

    def found(high: float, before: float, share: float) -> BapoBounds:
        return BapoBounds(low=0.6, high=high, share_before=before, share=share)

    bounds = [found(1.2, 0.5, 0.5), found(2.0, 0.3, 0.4), found(1.2, math.nan, math.nan)]
    assert area(step_of([sums()], bounds=bounds), "bapo") == {
        "clip_low": pytest.approx(0.6),
        "clip_high": pytest.approx(4.4 / 3),
        "share_before": pytest.approx(0.4),
        "share": pytest.approx(0.45),
        "share_min": 0.4,
    }


def test_every_metric_of_the_trainer_is_given():
    critic = CriticSums(num_tokens=1.0, squared_returns=1.0)
    found = step_of([sums()]) | summarize_critic([critic], grad_norms=[], lr=0.0)
    # the probe compares with the engines, which the trainer does not know
    others = ("experts/", "parity/probe_")
    expected = {name for name in UPDATE.metrics if not name.startswith(others)}
    assert found.keys() == expected
