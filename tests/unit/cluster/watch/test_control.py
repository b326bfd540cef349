"""Would catch: a driver that waits without an end for a daemon that is stopped, or is ended for one
that was only slow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from megadapo.cluster.watch.control import LIMIT_S, LOST, SILENT, ControlWatch, MainThread
from megadapo.errors import ProcessHungError

EVERY_S = LIMIT_S / 4


class Main(MainThread):
    """A main thread that is where the test says."""

    def __init__(self, *, in_ray: bool) -> None:
        super().__init__()
        self.in_ray = in_ray

    def stays_in_ray(self) -> bool:
        return self.in_ray


def watch_by_hand(ended: list[str], *, in_ray: bool = True) -> ControlWatch:
    """One whose intervals pass when the test counts them."""
    watch = ControlWatch(lambda: True, ended.append, main=Main(in_ray=in_ray), every_s=3600)
    watch._every_s = EVERY_S
    return watch


def answer(watch: ControlWatch, *, has_node: bool = True) -> None:
    watch._has_node = has_node
    watch._num_answers += 1


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
    with pytest.raises(ProcessHungError, match="gcs_server.* 60 s"):
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
    with pytest.raises(ProcessHungError, match="raylet"):
        watch.look()


def test_a_driver_that_works_is_not_ended_however_long_that_takes() -> None:
    """A save on the way out needs no daemon, and may take minutes."""
    ended: list[str] = []
    watch = watch_by_hand(ended, in_ray=False)
    for _ in range(100):
        watch.tick()
    assert ended == [] and not watch.answers


def test_only_one_call_of_ray_that_does_not_return_is_a_stay_in_it() -> None:
    main, gate, seen = MainThread(), threading.Lock(), list[bool]()
    wait_in: dict[str, Callable[[threading.Lock], None]] = {}
    for module in ("ray._private.worker", "megadapo.cluster.calls"):
        space = {"__name__": module}
        exec("def wait(gate):\n    gate.acquire()\n    gate.release()", space)
        wait_in[module] = space["wait"]  # type: ignore[assignment]

    def look() -> None:
        time.sleep(0.2)
        main.stays_in_ray()
        seen.append(main.stays_in_ray())
        gate.release()

    for module in (*wait_in, "ray._private.worker"):
        gate.acquire()
        looking = threading.Thread(target=look)
        looking.start()
        wait_in[module](gate)
        looking.join()
    assert seen == [True, False, True]


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

    watch = ControlWatch(ask, ended.append, main=Main(in_ray=True), every_s=0.001)
    watch._silent_s = LIMIT_S
    assert asked.wait(30)
    until(lambda: not watch.answers)
    watch._stuck_s = LIMIT_S
    until(lambda: bool(ended))
    assert set(ended) == {SILENT}
    watch.close()
    forever.set()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
