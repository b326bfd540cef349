"""When a batch is full and what is in it: a function of orders alone, whoever comes back first."""

from __future__ import annotations

import random

import pytest

from megadapo.rollout.sampling.asking import KeepRate
from megadapo.rollout.sampling.plans import PartialPlan, Plan, RoundsPlan, SyncPlan

ANY = KeepRate()


def ask(plan: Plan, orders) -> None:
    for order in orders:
        plan.ask(order, ANY)


def test_a_late_group_is_waited_for():
    plan = SyncPlan(2, 100)
    ask(plan, [3, 5, 8])
    plan.settle(5, True)
    plan.settle(8, True)
    assert not plan.is_full and plan.cannot_make_batch() == []
    plan.settle(3, True)
    assert plan.is_full and plan.chosen() == [3, 5]


def test_what_cannot_get_in_is_known_before_the_batch_is_full():
    plan = SyncPlan(2, 100)
    ask(plan, [0, 1, 2, 3, 4])
    plan.settle(1, True)
    plan.settle(2, True)
    assert plan.cannot_make_batch() == [3, 4]
    plan.drop([3, 4])
    plan.settle(0, True)
    assert plan.chosen() == [0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_finishing_gives_the_same_batch(seed):
    source = random.Random(seed)
    orders = sorted(source.sample(range(1000), 60))
    signals = {order: source.random() < 0.4 for order in orders}
    expected = [order for order in orders if signals[order]][:10]
    plan = SyncPlan(10, 100)
    ask(plan, orders)
    while not plan.is_full:
        order = source.choice(list(plan.open))
        plan.settle(order, signals[order])
        plan.drop(plan.cannot_make_batch())
    assert plan.chosen() == expected


def test_a_step_that_falls_short_names_what_it_has():
    plan = SyncPlan(3, 4)
    ask(plan, range(4))
    assert not plan.wants(ANY), "the bound on groups asked for"
    for order, signal in enumerate([True, False, True, False]):
        plan.settle(order, signal)
    assert not plan.is_full and plan.chosen() == [0, 2]


def test_a_round_is_asked_for_as_a_whole_and_waited_for_as_a_whole():
    plan = RoundsPlan(2, 7, round_size=4)
    orders = iter(range(100))
    asked = []
    while plan.wants(ANY):
        asked.append(next(orders))
        plan.ask(asked[-1], ANY)
    assert asked == [0, 1, 2, 3]
    for order in (0, 1, 3):
        plan.settle(order, order == 1)
        assert not plan.wants(ANY) and not plan.is_full
    plan.settle(2, False)
    assert not plan.is_full and plan.wants(ANY)
    while plan.wants(ANY):
        asked.append(next(orders))
        plan.ask(asked[-1], ANY)
    assert asked == list(range(7)), "the second round ends at the bound"
    for order in (6, 5, 4):
        plan.settle(order, True)
    assert plan.is_full and plan.chosen() == [1, 4]


def test_a_group_that_would_grow_too_old_is_waited_for():
    plan = PartialPlan(2, 100, num_usable=8)
    plan.carry(3, ANY, due=True)
    plan.carry(4, ANY, due=False)
    ask(plan, [10, 11])
    plan.settle(10, True)
    plan.settle(11, True)
    assert not plan.is_full
    plan.settle(3, True)
    assert plan.is_full and plan.chosen() == [3, 10]
    assert list(plan.open) == [4]


def test_partial_rollouts_stop_asking_where_groups_would_have_to_wait_too_long():
    plan = PartialPlan(4, 1000, num_usable=8)
    order = 0
    while plan.wants(ANY):
        plan.ask(order, ANY)
        order += 1
    assert 4 < order < 16
