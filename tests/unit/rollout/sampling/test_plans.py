"""Batch plans: batches that depend on who finishes first, and too few or too many requests."""

import math
import random
from collections.abc import Iterable

import pytest

from megadapo.rollout.sampling.plans import (
    ExpectedMixed,
    KeepRate,
    PartialPlan,
    Plan,
    RoundsPlan,
    SyncPlan,
    should_oversample,
    would_go_stale,
)

ANY = KeepRate()


def ask(plan: Plan, indices: Iterable[int]) -> None:
    for index in indices:
        plan.ask(index, ANY)


def ask_all(plan: Plan, first: int) -> list[int]:
    """Ask for groups from prompt `first` on while the plan wants any."""
    asked = []
    while plan.wants(ANY):
        asked.append(first + len(asked))
        plan.ask(asked[-1], ANY)
    return asked


def test_sync_waits_for_earlier_groups():
    plan = SyncPlan(2, 100)
    ask(plan, [3, 5, 8])
    plan.finish(5, True)
    plan.finish(8, True)
    assert not plan.is_full and plan.cannot_make_batch() == []
    plan.finish(3, True)
    assert plan.is_full and plan.chosen() == [3, 5]


def test_groups_behind_the_batch_are_cancelled_early():
    plan = SyncPlan(2, 100)
    ask(plan, [0, 1, 2, 3, 4])
    plan.finish(1, True)
    plan.finish(2, True)
    assert plan.cannot_make_batch() == [3, 4]
    plan.drop([3, 4])
    plan.finish(0, True)
    assert plan.chosen() == [0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_batch_does_not_depend_on_finishing_order(seed):
    source = random.Random(seed)
    indices = sorted(source.sample(range(1000), 60))
    signals = {index: source.random() < 0.4 for index in indices}
    expected = [index for index in indices if signals[index]][:10]
    plan = SyncPlan(10, 100)
    ask(plan, indices)
    while not plan.is_full:
        index = source.choice(list(plan.open))
        plan.finish(index, signals[index])
        plan.drop(plan.cannot_make_batch())
    assert plan.chosen() == expected


def test_sync_shortfall_returns_found_groups():
    plan = SyncPlan(3, 4)
    ask(plan, range(4))
    assert not plan.wants(ANY), "the limit on requests"
    for index, signal in enumerate([True, False, True, False]):
        plan.finish(index, signal)
    assert not plan.is_full and plan.chosen() == [0, 2]


def test_rounds_are_requested_and_awaited_as_a_whole():
    plan = RoundsPlan(2, 7, round_size=4)
    assert ask_all(plan, 0) == [0, 1, 2, 3]
    for index in (0, 1, 3):
        plan.finish(index, index == 1)
        assert not plan.wants(ANY) and not plan.is_full
    plan.finish(2, False)
    assert not plan.is_full
    assert ask_all(plan, 4) == [4, 5, 6], "the second round ends at the bound"
    for index in (6, 5, 4):
        plan.finish(index, True)
    assert plan.is_full and plan.chosen() == [1, 4]


def test_partial_waits_for_groups_that_are_due():
    plan = PartialPlan(2, 100, num_usable=8)
    plan.resume(3, ANY, due=True)
    plan.resume(4, ANY, due=False)
    ask(plan, [10, 11])
    plan.finish(10, True)
    plan.finish(11, True)
    assert not plan.is_full
    plan.finish(3, True)
    assert plan.is_full and plan.chosen() == [3, 10]
    assert list(plan.open) == [4]


def test_partial_stops_before_groups_go_stale():
    assert 4 < len(ask_all(PartialPlan(4, 1000, num_usable=8), 0)) < 16


def keep_rate(num_asked: int, num_mixed: int) -> KeepRate:
    rate = KeepRate()
    rate.end_step(num_asked, num_mixed)
    return rate


def expected_mixed(num_groups: int, rate: KeepRate) -> ExpectedMixed:
    expected = ExpectedMixed()
    expected.add(rate, num_groups)
    return expected


def num_asked(num_needed: int, rate: KeepRate, *, num_at_once: int) -> int:
    """Return the number of groups requested before any of them finishes."""
    count = 0
    while should_oversample(num_needed, expected_mixed(count, rate), rate, num_at_once=num_at_once):
        count += 1
    return count


def test_initial_keep_rate_is_uniform():
    assert KeepRate().value == 0.5
    assert KeepRate().variance == pytest.approx(1 / 12)  # of a flat distribution


def test_newest_step_has_the_largest_weight():
    rate = KeepRate()
    for _ in range(20):
        rate.end_step(100, 0)
    for _ in range(4):
        rate.end_step(100, 100)
    assert rate.value > 0.9


def test_step_without_requests_keeps_the_rate():
    """A level that is requested once per epoch would be forgotten in between."""
    rate = keep_rate(100, 30)
    before = rate.value
    for _ in range(10):
        rate.end_step(0, 0)
    assert rate.value == before


def test_counts_of_current_step_are_replaced_at_its_end():
    rate = KeepRate()
    for _ in range(10):
        rate.add(True)
    assert rate.value > 0.9
    rate.end_step(4, 1)
    assert rate.value == keep_rate(4, 1).value


def test_requests_reach_the_expected_batch_size():
    for yield_ in (0.1, 0.35, 0.9):
        rate = keep_rate(100_000, int(100_000 * yield_))
        assert num_asked(100, rate, num_at_once=1) == math.ceil(100 / rate.value)


def test_oversampling_grows_with_concurrency_and_uncertainty():
    """With many concurrent groups, another group costs each of them little."""
    rate, vague = keep_rate(100_000, 35_000), keep_rate(100, 35)
    counts = [num_asked(128, rate, num_at_once=n) for n in (1, 16, 256, 4096)]
    assert counts == sorted(counts) and counts[0] < counts[-1] < 1.5 * counts[0]
    assert num_asked(128, vague, num_at_once=4096) > counts[-1]


def test_first_requests_fill_most_batches():
    """Requests for the mean alone would need a second round in every other step."""
    rate, source = keep_rate(100_000, 35_000), random.Random(0)
    asked = num_asked(512, rate, num_at_once=2048)
    full = sum(sum(source.random() < 0.35 for _ in range(asked)) >= 512 for _ in range(300))
    assert full > 0.8 * 300


def test_no_oversampling_for_full_or_certain_batches():
    rate = keep_rate(100, 50)
    assert not should_oversample(0, ExpectedMixed(), rate, num_at_once=1000)
    assert not should_oversample(-3, ExpectedMixed(), rate, num_at_once=1000)
    assert not should_oversample(1, ExpectedMixed(mean=1.0), rate, num_at_once=1000)


def test_expectations_of_different_rates_add_up():
    """A mean rate would treat prompts with 0.99 and 0.01 as two coin flips."""
    sure, coin = keep_rate(10**9, 10**9), keep_rate(10**9, 5 * 10**8)
    expected = expected_mixed(2, sure)
    expected.add(coin, 1)
    assert expected.mean == pytest.approx(2.5)
    assert expected.variance == pytest.approx(0.25, abs=1e-3)


def test_errors_of_one_rate_are_correlated():
    """Independent errors would make an uncertain rate look certain."""
    vague, other = keep_rate(7, 3), keep_rate(7, 3)
    together = expected_mixed(20, vague)
    apart = expected_mixed(10, vague)
    apart.add(other, 10)
    coins = 20 * vague.value * (1 - vague.value)
    assert together.variance - coins == pytest.approx(20**2 * vague.variance)
    assert apart.variance - coins == pytest.approx(2 * 10**2 * vague.variance)


def test_would_go_stale_has_a_margin():
    rate = keep_rate(10**9, 5 * 10**8)
    assert not would_go_stale(20, 0, expected_mixed(10, rate))
    assert would_go_stale(20, 0, expected_mixed(40, rate))
    assert would_go_stale(20, 20, ExpectedMixed())
    # two standard deviations: 30 groups give 15 +- 2.7
    assert would_go_stale(20, 0, expected_mixed(30, rate))
    assert not would_go_stale(21, 0, expected_mixed(30, rate))
