"""Rounds, partial rollouts, selection and cooldowns."""

import numpy as np
import pytest

from megadapo.errors import SamplingError
from tests.support.rollout.samplers import RARE, make_sampler, take
from tests.support.rollout.scripted_engines import POLICY_VERSION, ScriptedEngines


def test_rounds_wait_for_all_groups_and_drop_surplus():
    """verl requests 1,536 prompts at a time, and another 1,536 if these do not suffice."""
    engines = ScriptedEngines("short first", slots=30)
    sampler = make_sampler(engines, mode="rounds", prompts_per_round=24, num_prompts=1000)
    batches = take(sampler, 6)
    assert {batch.num_sampled % 24 for batch in batches} == {0}
    assert sum(batch.num_surplus for batch in batches) > 0
    assert engines.asked == list(range(sum(batch.num_sampled for batch in batches)))
    for batch in batches:
        assert batch.num_kept == 8 and batch.num_stopped == batch.num_from_reserve == 0
        indices = [group.prompt_index for group in batch.groups]
        assert indices == sorted(indices)


def test_second_round_if_the_first_does_not_suffice():
    engines = ScriptedEngines(slots=9)
    sampler = make_sampler(
        engines, bound=RARE, mode="rounds", num_prompts=1000, max_asked_per_prompt=40.0
    )
    (batch,) = take(sampler, 1)
    assert batch.num_kept == 8 and batch.num_sampled > 16 and batch.num_sampled % 8 == 0


PARTIAL = {"mode": "partial", "max_staleness": 2, "num_prompts": 1000}


@pytest.mark.parametrize("finish", ["in order", "short first", "last first", "at random"])
def test_partial_loses_and_repeats_no_group(finish):
    engines = ScriptedEngines(finish, slots=60)
    sampler = make_sampler(engines, saved_groups="all", **PARTIAL)
    batches = take(sampler, 12)
    trained = [group.prompt_index for batch in batches for group in batch.groups]
    assert len(trained) == len(set(trained)) == 12 * 8
    consumed = {s.group.prompt_index for batch in batches for s in batch.saved}
    state = sampler.state_dict()
    waiting = {entry["prompt_index"] for entry in state["unfinished"] + state["reserve"]}
    assert set(engines.asked) == consumed | waiting
    # with so few groups per step, many can become due at once
    assert sum(batch.num_dropped for batch in batches) < 0.15 * len(trained)


def test_partial_step_without_new_groups():
    """Groups that had to be waited for may fill the next batch as well."""
    batches = take(make_sampler(ScriptedEngines("short first", slots=12), **PARTIAL), 6)
    assert [batch.num_kept for batch in batches] == [8] * 6
    nothing_new = [batch for batch in batches if batch.num_sampled == 0]
    assert nothing_new and all(np.isnan(batch.accuracy) for batch in nothing_new)


def test_partial_response_has_versions_per_token():
    engines = ScriptedEngines("last first", slots=60)
    batches = take(make_sampler(engines, **PARTIAL), 12)
    spans = set()
    for version, batch in enumerate(batches, start=POLICY_VERSION):
        for group in batch.groups:
            assert group.oldest_version >= version - 2, "older than max_staleness allows"
            for response in group.responses:
                versions = response.policy_versions.tolist()
                assert len(versions) == len(response.token_ids) and versions == sorted(versions)
                spans.add(len(set(versions)))
    assert spans >= {1, 2, 3}


def test_partial_carries_groups_and_stops_none():
    """Engines must not wait for the longest response of a step."""
    engines = ScriptedEngines(slots=12)
    batches = take(make_sampler(engines, **PARTIAL), 6)
    assert all(batch.num_carried > 0 for batch in batches)
    assert all(batch.num_stopped == batch.num_tokens_stopped == 0 for batch in batches)


def test_solved_prompts_are_skipped():
    """They cost as much as others and give no gradient."""
    easy = {"bound": 12, "num_prompts": 20, "rest_after": 1, "rest_epochs": 2}
    with_cooldown = take(make_sampler(ScriptedEngines(), **easy), 6)
    without = take(make_sampler(ScriptedEngines(), **easy | {"rest_after": None}), 6)
    assert sum(b.num_resting for b in with_cooldown) > 0 == sum(b.num_resting for b in without)
    assert sum(b.num_all_correct for b in with_cooldown) < sum(b.num_all_correct for b in without)


def test_cooldown_is_ignored_if_it_covers_all_prompts():
    """The run would search for a prompt forever."""
    solved = {"bound": -1, "num_prompts": 5, "rest_after": 1}
    with pytest.raises(SamplingError, match="24 all correct"):
        make_sampler(ScriptedEngines(), max_asked_per_prompt=3.0, **solved).next_batch()
    sampler = make_sampler(ScriptedEngines(), selection="all", **solved)
    assert [batch.num_kept for batch in take(sampler, 4)] == [8] * 4


def test_accuracy_range():
    config = {"accuracy_range": (0.0, 0.5), "saved_groups": "all"}
    batches = take(make_sampler(ScriptedEngines(), **config), 3)
    right = [sum(group.correct) for batch in batches for group in batch.groups]
    assert set(right) == {1}
    out = [s for b in batches for s in b.saved if s.disposition == "out_of_band"]
    assert {sum(s.group.correct) for s in out} == {2}
