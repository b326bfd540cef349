"""Would catch: a run that waits without an end for a control service that is stopped, or ends for
one that was only slow."""

from __future__ import annotations

import threading
import time

import pytest

from megadapo.cluster.control import COUNTED_S, ControlWatch
from megadapo.errors import Hung


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_service_that_does_not_answer_is_named_and_a_slow_one_is_not() -> None:
    clock, answers = Clock(), threading.Semaphore(0)
    watch = ControlWatch(lambda: answers.acquire() and None, every_s=0.001, limit_s=60, clock=clock)
    for _ in range(3):
        for _ in range(10):
            clock.now += 5.0
            watch.look()
        answered(watch, answers)
        watch.look()
    with pytest.raises(Hung, match="gcs_server.* 60 s"):
        for _ in range(13):
            clock.now += 5.0
            watch.look()
    assert watch.is_silent
    watch.close()


def test_time_that_the_driver_itself_was_stopped_counts_little() -> None:
    """A laptop that was closed overnight has not lost its control service."""
    clock = Clock()
    watch = ControlWatch(threading.Event().wait, every_s=0.001, limit_s=60, clock=clock)
    clock.now += 40_000.0
    watch.look()
    assert COUNTED_S < 60 and not watch.is_silent
    watch.close()


def answered(watch: ControlWatch, answers: threading.Semaphore) -> None:
    """Let it answer, and wait until that is counted."""
    before = watch._answers
    answers.release()
    while watch._answers == before:
        time.sleep(0.001)
