"""Counts of an engine's activity."""

import pytest

from megadapo.rollout.engine import activity
from megadapo.rollout.engine.activity import ActivityCounter


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = [100.0]
    monkeypatch.setattr(activity.time, "monotonic", lambda: now[0])
    return now


def step(counter, running, **numbers):
    counter.step(
        running=running,
        waiting=numbers.get("waiting", 0),
        kv_use=numbers.get("kv_use", 0.0),
        num_preemptions=numbers.get("preemptions", 0),
        num_prompt_tokens=numbers.get("prompt", 0),
        num_cached_tokens=numbers.get("cached", 0),
    )


def test_means_are_weighted_by_time(clock):
    """A mean over steps would weight short and long ones alike, and count idle time."""
    counter = ActivityCounter(8)
    clock[0] += 10.0  # nothing runs yet
    step(counter, 8, waiting=5, kv_use=0.5, prompt=40, cached=32)
    clock[0] += 1.0
    step(counter, 4, waiting=2, kv_use=0.75, preemptions=2, prompt=20)
    clock[0] += 3.0
    step(counter, 0)
    clock[0] += 6.0
    taken = counter.take(20)
    assert taken.num_tokens == 20 and taken.num_preemptions == 2 and taken.max_waiting == 5
    assert taken.seconds == pytest.approx(20.0) and taken.busy_seconds == pytest.approx(4.0)
    assert taken.mean_running == pytest.approx((8 * 1.0 + 4 * 3.0) / 4.0 / 8)
    assert taken.max_kv_use == 0.75
    assert (taken.num_prompt_tokens, taken.num_cached_tokens) == (60, 32)


def test_take_resets_counts_but_keeps_running_responses(clock):
    counter = ActivityCounter(4)
    step(counter, 2, waiting=9, kv_use=0.9, preemptions=1, prompt=9, cached=8)
    clock[0] += 2.0
    counter.take(3)
    clock[0] += 1.0
    step(counter, 0)
    taken = counter.take(5)
    assert taken.num_tokens == 2
    assert taken.busy_seconds == pytest.approx(1.0) and taken.mean_running == pytest.approx(0.5)
    assert (taken.max_waiting, taken.num_preemptions, taken.max_kv_use) == (0, 0, 0.0)
    assert (taken.num_prompt_tokens, taken.num_cached_tokens) == (0, 0)


def test_idle_engine_is_not_busy(clock):
    taken = ActivityCounter(4).take(0)
    assert (taken.busy_seconds, taken.mean_running, taken.seconds) == (0.0, 0.0, 0.0)
