"""How many groups are asked for: too few cost a second tail, too many cost throughput."""

from __future__ import annotations

import math
import random

import pytest

from megadapo.rollout.sampling.asking import (
    ExpectedMixed,
    KeepRate,
    should_oversample,
    would_go_stale,
)


def estimate(num_asked: int, num_with_signal: int) -> KeepRate:
    known = KeepRate()
    known.end_step(num_asked, num_with_signal)
    return known


def chances_of(num_groups: int, known: KeepRate) -> ExpectedMixed:
    chances = ExpectedMixed()
    chances.add(known, num_groups)
    return chances


def num_asked(num_needed: int, known: KeepRate, *, num_at_once: int) -> int:
    """Groups asked for before any of them has come back."""
    count = 0
    while should_oversample(num_needed, chances_of(count, known), known, num_at_once=num_at_once):
        count += 1
    return count


def test_the_first_guess_is_a_half_and_knows_that_it_is_one():
    assert KeepRate().value == 0.5
    assert KeepRate().variance == pytest.approx(1 / 12)  # of a flat distribution


def test_the_newest_step_weighs_most():
    known = KeepRate()
    for _ in range(20):
        known.end_step(100, 0)
    for _ in range(4):
        known.end_step(100, 100)
    assert known.value > 0.9


def test_a_step_in_which_nothing_was_asked_forgets_nothing():
    """The yield of prompts seen once an epoch would be forgotten between two of them."""
    known = estimate(100, 30)
    before = known.value
    for _ in range(10):
        known.end_step(0, 0)
    assert known.value == before


def test_what_is_seen_within_a_step_counts_until_the_step_is_over():
    """Who finishes first decides what is seen when, and must not decide anything afterwards."""
    known = KeepRate()
    for _ in range(10):
        known.see(True)
    assert known.value > 0.9
    known.end_step(4, 1)
    assert known.value == estimate(4, 1).value


def test_the_estimate_survives_a_checkpoint_exactly():
    one, other = KeepRate(), KeepRate()
    for asked, with_signal in ((39, 30), (7, 1), (3, 3)):
        one.end_step(asked, with_signal)
    other.load_state_dict(one.state_dict())
    assert (other.value, other.variance) == (one.value, one.variance)


def test_at_least_what_is_expected_to_fill_the_batch_is_asked_for():
    for yield_ in (0.1, 0.35, 0.9):
        known = estimate(100_000, int(100_000 * yield_))
        assert num_asked(100, known, num_at_once=1) == math.ceil(100 / known.value)


def test_more_is_asked_for_the_more_runs_at_once_and_the_less_is_known():
    """With many groups at once one group more costs each of them little."""
    known, vague = estimate(100_000, 35_000), estimate(100, 35)
    counts = [num_asked(128, known, num_at_once=n) for n in (1, 16, 256, 4096)]
    assert counts == sorted(counts) and counts[0] < counts[-1] < 1.5 * counts[0]
    assert num_asked(128, vague, num_at_once=4096) > counts[-1]


def test_the_batch_is_full_of_what_was_asked_for_in_nearly_all_steps():
    """A rule that asks for the mean alone needs a second request in every other step, which costs
    most where many groups share the engines."""
    known, source = estimate(100_000, 35_000), random.Random(0)
    asked = num_asked(512, known, num_at_once=2048)
    full = sum(sum(source.random() < 0.35 for _ in range(asked)) >= 512 for _ in range(300))
    assert full > 0.8 * 300


def test_nothing_is_asked_for_a_full_batch_nor_where_the_outcome_is_certain():
    known = estimate(100, 50)
    assert not should_oversample(0, ExpectedMixed(), known, num_at_once=1000)
    assert not should_oversample(-3, ExpectedMixed(), known, num_at_once=1000)
    assert not should_oversample(1, ExpectedMixed(mean=1.0), known, num_at_once=1000)


def test_prompts_of_different_yields_are_added_up():
    """The mean alone would call two prompts of 0.99 and 0.01 two coins."""
    sure, coin = estimate(10**9, 10**9), estimate(10**9, 5 * 10**8)
    chances = chances_of(2, sure)
    chances.add(coin, 1)
    assert chances.mean == pytest.approx(2.5)
    assert chances.variance == pytest.approx(0.25, abs=1e-3)


def test_one_wrong_guess_is_wrong_for_all_groups_it_is_made_for():
    """Counted as if each erred by itself, a vague yield would look as sure as a coin's."""
    vague, other = estimate(7, 3), estimate(7, 3)
    together = chances_of(20, vague)
    apart = chances_of(10, vague)
    apart.add(other, 10)
    coins = 20 * vague.value * (1 - vague.value)
    assert together.variance - coins == pytest.approx(20**2 * vague.variance)
    assert apart.variance - coins == pytest.approx(2 * 10**2 * vague.variance)


def test_groups_that_could_find_no_batch_are_not_begun():
    known = estimate(10**9, 5 * 10**8)
    assert not would_go_stale(20, 0, chances_of(10, known))
    assert would_go_stale(20, 0, chances_of(40, known))
    assert would_go_stale(20, 20, ExpectedMixed())
    # two standard deviations: 30 groups give 15 +- 2.7
    assert would_go_stale(20, 0, chances_of(30, known))
    assert not would_go_stale(21, 0, chances_of(30, known))
