"""The sampler's thread: batches that are lost, sampled twice or waited for without end."""

import random
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from megadapo.rollout.sampling.background import POLL_S, BackgroundSampler
from megadapo.rollout.sampling.schedule import SamplingSchedule
from megadapo.run.rollouts import LiveRollouts
from tests.support.processes.running import wait_until
from tests.support.rollout.clocked_engines import ClockedEngines
from tests.support.rollout.samplers import contents, make_sampler, saved_state
from tests.support.rollout.scripted_engines import AtOnce, KilledAfter, KilledError, ScriptedEngines

MODE = {"mode": "one_step_off", "max_staleness": 1, "sampler": {"new_executor": AtOnce}}
NUM_STEPS = 4


def start(engines, *, state=None, version=0):
    engines.policy_version = version
    sampler = BackgroundSampler(make_sampler(engines, saved_groups="all", **MODE), NUM_STEPS)
    if state is not None:
        sampler.load_state_dict(state)
    sampler.resume_sampling(version)
    return sampler


def publish(sampler, engines):
    sampler.pause_for_weights()
    engines.policy_version += 1
    sampler.resume_sampling(engines.policy_version)


def all_batches():
    engines = ScriptedEngines()
    sampler, batches = start(engines), []
    for _ in range(NUM_STEPS):
        batches.append(sampler.next_batch())
        publish(sampler, engines)
    sampler.close()
    assert engines.num_in_flight == 0
    return contents(batches)


def test_no_batch_is_sampled_for_a_step_after_the_last():
    engines = ScriptedEngines()
    sampler = start(engines)
    for _ in range(NUM_STEPS):
        sampler.next_batch()
        publish(sampler, engines)
    sampler.close()
    other = ScriptedEngines()
    plain = make_sampler(other, **MODE)
    for _ in range(NUM_STEPS):
        plain.next_batch()
    assert set(engines.asked) == set(other.asked)


def test_engines_are_idle_from_a_publication_to_the_next_batch():
    """An evaluation that training waits for uses them then; it took groups of the sampler."""
    engines = ScriptedEngines(slots=12)
    sampler = start(engines)
    for _ in range(2):
        asked = list(engines.asked)
        time.sleep(3 * POLL_S)
        assert engines.num_in_flight == 0 and engines.asked == asked
        sampler.next_batch()
        publish(sampler, engines)
    sampler.close()


def test_no_group_is_submitted_while_engines_take_weights():
    """They refuse to generate then, which would end the run."""
    engines = ScriptedEngines(slots=12)
    mode = MODE | {"mode": "async", "max_staleness": 2, "num_prompts": 1000}
    engines.policy_version = 0
    sampler = BackgroundSampler(make_sampler(engines, **mode), NUM_STEPS)
    sampler.resume_sampling(0)
    for _ in range(3):
        sampler.next_batch()
        sampler.pause_for_weights()
        num_asked = len(engines.asked)
        time.sleep(3 * POLL_S)
        assert engines.num_in_flight == 0 and len(engines.asked) == num_asked
        engines.policy_version += 1
        sampler.resume_sampling(engines.policy_version)
        wait_until(lambda before=num_asked: len(engines.asked) > before)
    sampler.close()


@pytest.mark.parametrize("step", [1, 2, 3])
def test_waiting_batch_survives_a_restart(step):
    """It has the weights before the checkpoint's, which no engine has any more."""
    engines = ScriptedEngines()
    sampler = start(engines)
    for _ in range(step):
        sampler.next_batch()
        publish(sampler, engines)
    state = saved_state(sampler)
    sampler.close()
    again = ScriptedEngines("last first")
    resumed, batches = start(again, state=state, version=step), []
    for _ in range(step, NUM_STEPS):
        batches.append(resumed.next_batch())
        publish(resumed, again)
    resumed.close()
    assert contents(batches) == all_batches()[step:]
    trained = {group.prompt_index for group in batches[0].groups}
    assert not trained & set(again.asked), "the waiting batch was sampled again"


def test_batch_that_failed_is_sampled_again():
    """A finished update could not be saved if the batch sampled beside it had failed."""
    plain = ScriptedEngines()
    plain.policy_version = 0
    whole = make_sampler(plain, saved_groups="all", **MODE)
    whole.next_batch()
    dying = KilledAfter(plain.num_handed_back + 2)
    expected = contents([whole.next_batch()])
    failed = start(dying)
    failed.next_batch()
    with pytest.raises(KilledError):
        failed.pause_for_weights()
    with pytest.raises(KilledError):
        failed.next_batch()
    state = saved_state(failed)
    failed.close()
    resumed = start(ScriptedEngines(), state=state, version=0)
    assert contents([resumed.next_batch()]) == expected
    resumed.close()


class SlowEngines(ClockedEngines):
    def finished(self, timeout_s=None):
        time.sleep(0.02)
        return super().finished(timeout_s)


def test_publication_of_a_repeated_run_begins_when_it_can_stop_the_engines(tmp_path):
    """It waited for groups within the publication, while a restarted engine had no weights."""
    mode = {"mode": "async", "max_staleness": 2, "num_prompts": 1000}

    def sampler(engines, schedule):
        engines.policy_version = 0
        own = {"new_executor": AtOnce, "schedule": schedule}
        return make_sampler(engines, sampler=own, **mode)

    first = ClockedEngines(random.Random(1), slots=60)
    source = sampler(first, SamplingSchedule(tmp_path / "a"))
    source.resume_sampling(0)
    for _ in range(3):
        source.next_batch()
        for _ in range(12):
            source.turn()
        publish(source, first)

    engines = SlowEngines(random.Random(2), slots=60)
    repeated = sampler(engines, SamplingSchedule(source=tmp_path / "a"))
    may_stop = []

    class Publisher:
        def publish(self, version, *, stop_generating):
            may_stop.append(repeated.can_pause)
            stop_generating()
            engines.policy_version = version

    background = BackgroundSampler(repeated, NUM_STEPS)
    others = dict.fromkeys(("config", "engines", "inputs", "evaluations"))
    gpus = SimpleNamespace(publishing=nullcontext)
    rollouts = LiveRollouts(sampler=background, publisher=Publisher(), gpus=gpus, **others)
    background.resume_sampling(0)
    for step in (1, 2, 3):
        background.next_batch()
        rollouts.publish(step)
    background.close()
    assert may_stop == [True] * 3
