"""Reserve and resume: groups that are too old, trained on twice, or lost."""

import json

import pytest

from megadapo.errors import CheckpointError, DataError
from megadapo.rollout.sampling.sampler import SampledBatch
from tests.support.rollout.samplers import contents, make_sampler, take
from tests.support.rollout.scripted_engines import (
    POLICY_VERSION,
    ScriptedEngines,
)


def test_surplus_is_used_first():
    engines = ScriptedEngines("last first", slots=200)
    batches = take(make_sampler(engines, max_staleness=1), 6)
    assert sum(batch.num_to_reserve for batch in batches) > 0
    for before, after in zip(batches, batches[1:], strict=False):
        assert after.num_from_reserve == before.num_to_reserve
        versions = [group.oldest_version for group in after.groups]
        assert versions == sorted(versions)
        assert sum(v < max(versions) for v in versions) == after.num_from_reserve


def test_no_group_exceeds_max_staleness():
    engines = ScriptedEngines("at random", slots=200)
    sampler = make_sampler(engines, max_staleness=2)
    for version, batch in enumerate(take(sampler, 8), start=POLICY_VERSION):
        assert min(group.oldest_version for group in batch.groups) >= version - 2


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_every_prompt_is_used_once(max_staleness):
    """Skipping stopped groups would lose long responses."""
    engines = ScriptedEngines("at random", slots=60)
    sampler = make_sampler(
        engines, num_prompts=1000, saved_groups="all", max_staleness=max_staleness
    )
    batches = take(sampler, 8)
    consumed = [s.group.prompt_index for b in batches for s in b.saved if not s.from_reserve]
    assert len(consumed) == len(set(consumed))
    trained = [group.prompt_index for batch in batches for group in batch.groups]
    assert len(trained) == len(set(trained)) == 64
    assert set(range(max(trained) - 40)) <= set(consumed)


def test_counts_add_up_with_a_full_reserve():
    engines = ScriptedEngines("last first", slots=200)
    sampler = make_sampler(engines, max_staleness=1)
    dropped = 0
    for batch in take(sampler, 6):
        fresh = batch.num_kept - batch.num_from_reserve
        wasted = batch.num_all_correct + batch.num_all_wrong
        assert batch.num_sampled == fresh + batch.num_to_reserve + batch.num_dropped + wasted
        dropped += batch.num_dropped
    assert dropped > 0


@pytest.mark.parametrize("stop_after", [1, 2, 3])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_staleness": 2},
        {"mode": "partial", "max_staleness": 2},
        {"rest_after": 1},
    ],
    ids=["sync", "reserve", "partial", "memory"],
)
def test_resumed_run_equals_uninterrupted_run(stop_after, config):
    """Also twice in a row, with a non-empty reserve and across an epoch's end."""
    config = {"num_prompts": 31, **config}
    sampler = make_sampler(ScriptedEngines(slots=200, at_once=5), **config)
    expected = take(sampler, 7)
    batches: list[SampledBatch] = []
    state = make_sampler(ScriptedEngines(slots=200, at_once=5), **config).state_dict()
    while len(batches) < 7:
        engines = ScriptedEngines(slots=200, at_once=5)
        engines.policy_version += len(batches)
        resumed = make_sampler(engines, **config)
        resumed.load_state_dict(json.loads(json.dumps(state, allow_nan=False)))
        batches += take(resumed, min(stop_after, 7 - len(batches)))
        state = resumed.state_dict()
    assert contents(batches) == contents(expected)
    assert state == sampler.state_dict()
    stale = any(batch.num_from_reserve for batch in expected)
    assert stale == (config.get("max_staleness", 0) > 0)


@pytest.mark.parametrize("key", ["cursor", "difficulty", "reserve", "unfinished"])
def test_damaged_state_is_rejected(key):
    state = make_sampler(ScriptedEngines()).state_dict()
    del state[key]
    with pytest.raises((CheckpointError, DataError)):
        make_sampler(ScriptedEngines()).load_state_dict(state)
