"""Would catch: a driver that waits without an end for a daemon that is stopped, or is ended for one
that was only slow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from megadapo.cluster.control import LIMIT_S, LOST, SILENT, ControlWatch
from megadapo.errors import Hung

EVERY_S = LIMIT_S / 4


def watch_by_hand(ended: list[str]) -> ControlWatch:
    """One whose intervals pass when the test counts them."""
    watch = ControlWatch(lambda: True, ended.append, every_s=3600)
    watch._every_s = EVERY_S
    return watch


def answer(watch: ControlWatch, *, has_node: bool = True) -> None:
    watch._has_node = has_node
    watch._answers += 1


def test_a_service_that_does_not_answer_is_named_and_a_slow_one_is_not() -> None:
    ended: list[str] = []
    watch = watch_by_hand(ended)
    for _ in range(3):
        for _ in range(4):
            watch.tick()
            watch.look()
        answer(watch)
        watch.tick()
    assert watch.answers
    for _ in range(5):
        watch.tick()
    with pytest.raises(Hung, match="gcs_server.* 60 s"):
        watch.look()
    assert ended == [] and not watch.answers


def test_a_driver_whose_own_daemon_is_lost_is_told_and_ended_where_it_cannot_listen() -> None:
    """In Ray's own code, as when it asks a stopped daemon for room, it can do nothing else."""
    ended: list[str] = []
    watch = watch_by_hand(ended)
    for _ in range(5):
        answer(watch, has_node=False)
        watch.tick()
    assert ended == [LOST]
    with pytest.raises(Hung, match="raylet"):
        watch.look()


def test_a_problem_that_passes_ends_nothing() -> None:
    ended: list[str] = []
    watch = watch_by_hand(ended)
    for _ in range(3):
        for _ in range(8):
            watch.tick()
        assert not watch.answers
        answer(watch)
        watch.tick()
        watch.look()
    assert ended == []


def test_its_own_threads_ask_and_count() -> None:
    ended: list[str] = []
    asked, forever = threading.Event(), threading.Event()

    def ask() -> bool:
        asked.set()
        return forever.wait()

    watch = ControlWatch(ask, ended.append, every_s=0.001)
    watch._silent_s = LIMIT_S
    assert asked.wait(30)
    until(lambda: not watch.answers)
    watch._unnoticed_s = LIMIT_S
    until(lambda: bool(ended))
    assert set(ended) == {SILENT}
    watch.close()
    forever.set()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
