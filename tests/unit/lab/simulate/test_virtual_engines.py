"""Virtual engines behave like real ones towards the sampler."""

import pytest

from megadapo.data.group import Response
from megadapo.lab.simulate.engines import EngineSettings, VirtualEngines
from megadapo.lab.simulate.task import TaskSettings, ToyTask
from megadapo.plan.engine import EngineSpeed
from megadapo.rollout.types import OpenGroup, SamplingSettings

TASK = ToyTask(TaskSettings(num_responses=4, num_prompts=100, prompt_tokens=5))
SPEED = EngineSpeed(step_s=15e-3, response_s=40e-6, context_s=19e-9, prefill_s=30e-6)
"""About the speed of a 32B model in bfloat16 on four H200."""
SETTINGS = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=20480)


def request(key: int, begun: tuple[Response, ...] = ()) -> OpenGroup:
    seeds = tuple(1000 * key + index for index in range(4))
    return OpenGroup(
        key=key,
        prompt_ids=(key, 0, 0, 0, 0),
        seeds=seeds,
        responses=begun,
        settings=SETTINGS,
        priority=key,
    )


def engines(num_engines: int = 2) -> VirtualEngines:
    settings = EngineSettings(num_engines=num_engines, num_slots=8, speed=SPEED)
    return VirtualEngines(settings, TASK)


def test_every_group_returns_once_with_the_tasks_answers():
    some = engines()
    some.submit([request(key) for key in range(10)])
    assert some.num_in_flight == 10 and some.capacity == 0
    found = {}
    while some.num_in_flight:
        for group in some.finished():
            assert group.key not in found
            found[group.key] = group
            assert 0 < group.seconds <= some.now
    for key, group in found.items():
        draw = TASK.draw((key,), request(key).seeds)
        assert [len(one.token_ids) for one in group.responses] == draw.lengths.tolist()
        assert [one.text == "correct" for one in group.responses] == draw.correct.tolist()
    assert some.finished() == [] and some.capacity == 2 * 10
    lengths = [draw.lengths.sum() for draw in some.requested.values()]
    assert some.totals()[3] == pytest.approx(sum(lengths))


def test_groups_go_to_the_least_loaded_engine():
    some = engines()
    for first in (0, 2):
        some.submit([request(first), request(first + 1)])
    assert [activity.max_waiting for activity in some.activity()] == [0, 0]


def test_stopped_group_continues_with_new_weights_and_keeps_its_tokens():
    some = engines(1)
    some.submit([request(0)])
    some.finished(timeout_s=20.0)
    assert some.now == 20.0
    report = some.stop(keep=True)
    (part,) = report.unfinished
    done = [len(one.token_ids) for one in part.responses]
    assert report.num_tokens == sum(done) > 0 and some.num_in_flight == 0
    assert "unfinished" in {one.finish_reason for one in part.responses}
    some.publish()
    some.submit([request(0, begun=part.responses)])
    (group,) = some.finished()
    draw = TASK.draw((0,), request(0).seeds)
    for one, begun, length in zip(group.responses, done, draw.lengths, strict=True):
        assert len(one.token_ids) == len(one.logprobs) == len(one.policy_versions) == length
        assert one.policy_versions.tolist() == [0] * begun + [1] * (length - begun)
        assert one.finish_reason == ("length" if length == 20480 else "stop")


def test_group_that_is_requested_again_draws_new_responses_with_new_weights_only():
    some = engines(1)
    lengths = []
    for is_published in (False, False, True):
        if is_published:
            some.publish()
        some.submit([request(0)])
        some.stop(keep=False)
        lengths.append(some.requested[0].lengths.tolist())
    assert lengths[0] == lengths[1] != lengths[2]
    # every policy sees the same first responses, whatever its engines have published before
    late = engines(1)
    late.publish()
    late.submit([request(0)])
    assert late.requested[0].lengths.tolist() == lengths[0]


def test_dropped_tokens_are_counted():
    some = engines(1)
    some.submit([request(0), request(1)])
    some.finished(timeout_s=5.0)
    report = some.stop([1, 77], keep=False)
    assert report.keys == (1,) and not report.unfinished and report.num_tokens > 0
    assert some.num_in_flight == 1
    (activity,) = some.activity()
    assert activity.seconds == pytest.approx(5.0) and activity.mean_running > 0.999
    assert some.activity()[0].num_tokens == 0


def test_clock_stops_at_the_deadline():
    some = engines()
    some.submit([request(0)])
    some.deadline = 3.0
    assert some.finished() == [] and some.now == 3.0
    some.deadline = float("inf")
    assert [group.key for group in some.finished()] == [0]
