"""The virtual engine keeps time, order and every token when it is full or stopped."""

import math
from collections.abc import Sequence

import pytest

from megadapo.plan.engine import EngineSpeed, VirtualEngine, VirtualResponse

SPEED = EngineSpeed(step_s=2.0, response_s=0.5, context_s=0.01, prefill_s=0.1)
FLAT = EngineSpeed(step_s=1.0, response_s=0.0, context_s=0.0, prefill_s=0.0)


def response(key: int, num_tokens: int, num_prompt: int = 10) -> VirtualResponse:
    return VirtualResponse(
        key=key, index=0, priority=key, num_prompt=num_prompt, num_tokens=num_tokens
    )


def run(engine: VirtualEngine) -> list[tuple[float, int]]:
    ends = []
    while (now := engine.next_event()) < math.inf:
        ends += [(now, one.key) for one in engine.run_event(now)]
    return ends


def started(responses: Sequence[VirtualResponse]) -> VirtualEngine:
    engine = VirtualEngine(SPEED, num_slots=8)
    engine.add(responses)
    return engine


def test_time_of_one_response_counts_its_growing_cache():
    ((end, _),) = run(started([response(0, 100)]))
    prefill, context = 10 * 0.1, 0.01 * (10 * 100 + 100**2 / 2)
    assert end == pytest.approx(prefill + 100 * (2.0 + 0.5) + context)


def test_second_response_continues_alone():
    first, second = run(started([response(0, 40), response(1, 100)]))
    together = 2 * 10 * 0.1 + 40 * (2.0 + 2 * 0.5) + 0.01 * (20 * 40 + 2 * 40**2 / 2)
    alone = 60 * (2.0 + 0.5) + 0.01 * (50 * 60 + 60**2 / 2)
    assert first == (pytest.approx(together), 0)
    assert second == (pytest.approx(together + alone), 1)


def test_tokens_in_inverts_time_for():
    for num_running, num_context in ((1, 0.0), (7, 1e4), (256, 1e6)):
        seconds = SPEED.time_for(123.4, num_running, num_context)
        assert SPEED.tokens_in(seconds, num_running, num_context) == pytest.approx(123.4)
        assert FLAT.tokens_in(5.0, num_running, num_context) == 5.0
    assert SPEED.scaled(3.0).time_for(9, 4, 5.0) == pytest.approx(3 * SPEED.time_for(9, 4, 5.0))


def test_lowest_rank_takes_a_free_slot():
    engine = VirtualEngine(FLAT, num_slots=1)
    engine.add([response(3, 5), response(1, 7)])
    engine.add([response(2, 2)])
    assert run(engine) == [(7.0, 1), (9.0, 2), (14.0, 3)]
    counters = engine.counters
    assert (engine.load, counters.num_tokens, counters.max_waiting) == (0, 14, 2)


def test_stopped_responses_continue_where_they_were():
    whole = response(0, 50)
    ((uninterrupted, _),) = run(started([whole]))
    part = response(0, 50)
    engine = started([part])
    engine.advance(40.0)
    (stopped,) = engine.remove(lambda one: True)
    assert stopped is part and 0 < part.num_done < 50
    assert engine.next_event() == math.inf and engine.load == 0
    engine.add([part])
    ((end, _),) = run(engine)
    # its prompt and tokens are computed again; at most the token in progress is lost
    again = (10 + part.num_prompt) * 0.1
    assert uninterrupted < end < uninterrupted + again + 50 * 0.1 + SPEED.step_time(1, 60)


def test_utilisation_is_the_integral_of_running_responses():
    engine = VirtualEngine(FLAT, num_slots=2)
    engine.add([response(0, 10), response(1, 30)])
    run(engine)
    assert engine.counters.running_seconds == pytest.approx(10 + 30)
    assert engine.counters.busy_seconds == pytest.approx(30)
