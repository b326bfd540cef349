"""Rounds, partial rollouts, selection and the memory of prompts: what a step's settings change."""

from __future__ import annotations

import numpy as np
import pytest

from megadapo.errors import SamplingError
from tests.support.rollout.samplers import RARE, make_sampler, take
from tests.support.rollout.scripted_engines import POLICY_VERSION, ScriptedEngines


def test_rounds_wait_for_all_of_their_answers_and_throw_the_surplus_away():
    """verl asks for 1,536 prompts at a time, and for another 1,536 where these do not suffice."""
    engines = ScriptedEngines("short first", slots=30)
    sampler = make_sampler(engines, mode="rounds", prompts_per_round=24, num_prompts=1000)
    batches = take(sampler, 6)
    assert {batch.num_sampled % 24 for batch in batches} == {0}
    assert sum(batch.num_surplus for batch in batches) > 0
    assert engines.asked == list(range(sum(batch.num_sampled for batch in batches)))
    for batch in batches:
        assert batch.num_kept == 8 and batch.num_stopped == batch.num_from_reserve == 0
        orders = [group.order for group in batch.groups]
        assert orders == sorted(orders)


def test_a_second_round_is_asked_where_the_first_does_not_suffice():
    engines = ScriptedEngines(slots=9)
    sampler = make_sampler(
        engines, bound=RARE, mode="rounds", num_prompts=1000, max_asked_per_prompt=40.0
    )
    (batch,) = take(sampler, 1)
    assert batch.num_kept == 8 and batch.num_sampled > 16 and batch.num_sampled % 8 == 0


PARTIAL = {"mode": "partial", "max_staleness": 2, "num_prompts": 1000}


@pytest.mark.parametrize("finish", ["in order", "short first", "last first", "at random"])
def test_partial_rollouts_lose_no_group_and_train_on_none_twice(finish):
    engines = ScriptedEngines(finish, slots=60)
    sampler = make_sampler(engines, saved_groups="all", **PARTIAL)
    batches = take(sampler, 12)
    trained = [group.order for batch in batches for group in batch.groups]
    assert len(trained) == len(set(trained)) == 12 * 8
    settled = [s.group.order for b in batches for s in b.saved if s.fate != "trained"]
    asked = set(engines.asked)
    waiting = {entry.order for entry in sampler._unfinished}
    reserved = {group.order for group in sampler._reserve._groups}
    assert asked == set(trained) | set(settled) | waiting | reserved
    # so few groups a step make rare what is common here: many that come due at once
    assert sum(batch.num_dropped for batch in batches) < 0.15 * len(trained)


def test_a_step_may_need_nothing_new():
    """Where many groups had to be waited for, their batch may be there before the step begins."""
    batches = take(make_sampler(ScriptedEngines("short first", slots=12), **PARTIAL), 6)
    assert [batch.num_kept for batch in batches] == [8] * 6
    nothing_new = [batch for batch in batches if batch.num_sampled == 0]
    assert nothing_new and all(np.isnan(batch.accuracy) for batch in nothing_new)


def test_a_partial_answer_says_which_weights_each_token_is_from():
    engines = ScriptedEngines("last first", slots=60)
    batches = take(make_sampler(engines, **PARTIAL), 12)
    spans = set()
    for version, batch in enumerate(batches, start=POLICY_VERSION):
        for group in batch.groups:
            assert group.oldest_version >= version - 2, "older than max_staleness allows"
            for sample in group.samples:
                versions = sample.policy_versions.tolist()
                assert len(versions) == len(sample.response_ids) and versions == sorted(versions)
                spans.add(len(set(versions)))
    assert spans >= {1, 2, 3}


def test_partial_rollouts_leave_no_engine_idle():
    """Engines that wait for a step's longest answer are what partial rollouts are for."""
    engines = ScriptedEngines(slots=12)
    batches = take(make_sampler(engines, **PARTIAL), 6)
    assert all(batch.num_carried > 0 for batch in batches)
    assert all(batch.num_stopped == batch.num_tokens_stopped == 0 for batch in batches)


def test_prompts_that_are_always_right_rest():
    """They cost as much as others and teach nothing."""
    easy = {"bound": 12, "num_prompts": 20, "rest_after": 1, "rest_epochs": 2}
    with_rest = take(make_sampler(ScriptedEngines(), **easy), 6)
    without = take(make_sampler(ScriptedEngines(), **easy | {"rest_after": None}), 6)
    assert sum(b.num_resting for b in with_rest) > 0 == sum(b.num_resting for b in without)
    assert sum(b.num_all_correct for b in with_rest) < sum(b.num_all_correct for b in without)


def test_where_every_prompt_rests_none_does():
    """The run would look for a prompt forever."""
    sampler = make_sampler(
        ScriptedEngines(), bound=-1, num_prompts=5, rest_after=1, max_asked_per_prompt=3.0
    )
    with pytest.raises(SamplingError, match="24 all right"):
        sampler.next_batch()
    sampler = make_sampler(
        ScriptedEngines(), bound=-1, num_prompts=5, rest_after=1, selection="all"
    )
    assert [batch.num_kept for batch in take(sampler, 4)] == [8] * 4


def test_all_groups_can_be_kept():
    (batch,) = take(make_sampler(ScriptedEngines(), bound=-1, selection="all"), 1)
    assert [group.order for group in batch.groups] == list(range(8))


def test_a_band_of_accuracies_can_be_chosen():
    batches = take(make_sampler(ScriptedEngines(), max_accuracy=0.5, saved_groups="all"), 3)
    right = [sum(group.correct) for batch in batches for group in batch.groups]
    assert set(right) == {1}
    out = [s for b in batches for s in b.saved if s.fate == "out_of_band"]
    assert {sum(s.group.correct) for s in out} == {2}


def test_the_longest_go_first_where_that_is_asked_for():
    engines = ScriptedEngines(slots=60)
    sampler = make_sampler(engines, num_prompts=10, selection="all", longest_first=True)
    take(sampler, 3)
    lengths = [sampler._difficulty.mean_length(sampler._drawing.prompt(o).id) for o in range(10)]
    assert min(lengths) < max(lengths) < float("inf")
    seen = len(engines.asked)
    before = {order: sampler._expected_length(order) for order in range(60)}
    take(sampler, 1)
    first = [before[order] for order in engines.asked[seen:][:8]]
    assert first == sorted(first, reverse=True)
