"""Standard errors, differences paired by seed, and verdicts that the numbers support."""

import math

import numpy as np
import pytest
import scipy.stats

from megadapo.lab.ablation.measures import (
    END_STEPS,
    MEASURES,
    Noise,
    Spread,
    difference,
    measure,
    trained_not_mixed_share,
)
from megadapo.lab.ablation.report import Effect
from megadapo.lab.ablation.rows import Expectation
from tests.support.runs.ablations import ablation_of, finish


def test_measures_follow_from_the_records(tmp_path):
    run = ablation_of(tmp_path).runs[0]
    finish(run, accuracy=0.9, entropy=0.25)
    found = measure(run.folder, 0.6)
    assert found.keys() == {one.name for one in MEASURES}
    assert (found["held_out_before"], found["held_out_after"]) == (0.0, 0.9)
    assert found["steps_to_accuracy"] == 4.0
    # four steps of 2 s, of 100 tokens and 20 of stopped groups, not all six
    assert (found["tokens_to_accuracy"], found["seconds_to_accuracy"]) == (480.0, 8.0)
    at_start, never = measure(run.folder, 0.0), measure(run.folder, 0.95)
    for name, start in (("steps", 0.0), ("tokens", 0.0), ("seconds", 0.0)):
        assert at_start[f"{name}_to_accuracy"] == start and never[f"{name}_to_accuracy"] is None
    assert found["entropy"] == 0.25
    assert found["response_length"] == 10.0 + sum(range(7 - END_STEPS, 7)) / END_STEPS
    assert found["no_signal"] == pytest.approx(sum(1 + step for step in range(1, 7)) / 8 / 6)
    assert found["no_signal_trained"] == pytest.approx(found["no_signal"])
    assert found["clip_low"] is None
    assert (found["tokens"], found["seconds"]) == (720.0, 12.0)


def test_reserved_and_selected_groups_count_as_mixed():
    record = {"groups/sampled": 20, "groups/all_correct": 9, "groups/all_wrong": 3}
    assert trained_not_mixed_share({**record, "groups/kept": 8}) == 0.0
    reserved = {**record, "groups/kept": 10, "groups/from_reserve": 2}
    assert trained_not_mixed_share(reserved) == 0.0
    assert trained_not_mixed_share({**record, "groups/kept": 20}) == pytest.approx(0.6)
    assert trained_not_mixed_share({**record, "groups/kept": 0}) is None


def test_spread_ignores_missing_seeds():
    assert Spread.of([]) is None
    assert Spread.of([None, None]) is None
    single = Spread.of([None, 3.0])
    assert single == Spread(mean=3.0, standard_error=None, num=1)
    three = Spread.of([1.0, 2.0, None, 6.0])
    assert three is not None and three.standard_error is not None
    assert (three.mean, three.num) == (3.0, 3)
    assert three.standard_error == pytest.approx(scipy.stats.sem([1.0, 2.0, 6.0]))


@pytest.mark.parametrize("num", [2, 3, 5, 11, 40])
def test_interval_of_one_comparison_is_students_or_wider(num):
    spread = Spread(mean=1.0, standard_error=0.5, num=num)
    exact = 0.5 * scipy.stats.t.ppf(0.975, num - 1)
    noise = Noise.of([spread])
    assert noise is not None and noise.num_free == num - 1
    low, high = noise.interval(spread)
    assert high - 1.0 == pytest.approx(1.0 - low)
    assert high - 1.0 >= exact - 5e-4
    if num <= 11:
        assert high - 1.0 == pytest.approx(exact, rel=1e-3)


def test_noise_is_pooled_over_comparisons():
    """The interval of two seeds that agree to five digits by chance would exclude 0."""
    agreed, others = [0.00091, 0.00092], ([0.0, -0.0014], [0.003, 0.001, 0.002], [0.0, 0.0], [1.0])
    spreads = [Spread.of(values) for values in (agreed, *others)]
    noise = Noise.of([*spreads, None])
    squares = sum(np.var(values) * len(values) for values in (agreed, *others[:2]))
    assert noise is not None and noise.num_free == 4
    assert noise.deviation == pytest.approx(math.sqrt(squares / 4))
    low, high = noise.interval(spreads[0])
    assert low < 0.0 < high
    assert high - low == pytest.approx(2 * 2.776 * noise.deviation / math.sqrt(2))
    assert Noise.of([Spread.of([0.0, 0.0]), Spread.of([1.0])]) is None


def test_row_that_scatters_more_has_its_own_interval():
    """Rows that agree made 0.035 of three seeds look certain, whose own error was 0.019."""
    wide, calm = Spread.of([0.0, 0.04, 0.07]), Spread.of([0.0, 0.001, 0.002])
    assert wide is not None and wide.standard_error is not None and calm is not None
    noise = Noise.of([wide, *[calm] * 9])
    assert noise is not None
    low, high = noise.interval(wide)
    assert high - low == pytest.approx(2 * 4.303 * wide.standard_error)
    assert noise.interval(calm)[1] - calm.mean > 4.303 * (calm.standard_error or 0.0)


def test_differences_are_paired_by_seed():
    first = {1: {"x": 1.0}, 2: {"x": 5.0}, 4: {"x": 9.0}}
    second = {2: {"x": 5.5}, 1: {"x": 1.5}, 7: {"x": 0.0}}
    found = difference(second, first, "x")
    assert found == Spread(mean=0.5, standard_error=0.0, num=2)


@pytest.mark.parametrize("late", [{3: {"x": None}}, {3: {}}])
def test_missing_seed_leaves_no_difference(late):
    first = {1: {"x": 8.0}, 3: {"x": 12.0}}
    second = {1: {"x": 4.0}, **late}
    assert difference(second, first, "x") is None and difference(first, second, "x") is None


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([None, None], "not measured"),
        ([0.4], "not shown: one seed has no standard error"),
        ([0.4, 0.1], "not shown: the 95 % interval includes 0"),
        ([0.4, 0.4, 0.41], "higher, as expected"),
        ([-0.4, -0.4, -0.41], "lower, the opposite"),
        ([0.0, 0.0], "not shown: no difference in any seed"),
    ],
)
def test_verdict_claims_no_more_than_the_interval(values, verdict):
    effect = Effect(
        row="b",
        other="a",
        expectation=Expectation(measure="entropy", change="higher"),
        difference=Spread.of(values),
        noise=Noise.of([Spread.of(values)]),
    )
    assert effect.verdict == verdict
    assert not math.isnan(effect.difference.mean if effect.difference else 0.0)
