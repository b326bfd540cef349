"""A pool of engines between two threads: one waits for groups, the other one publishes or stops."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.types import OpenGroup
from megadapo.weights.sync.peers import UpdatePeers
from tests.support.processes.running import wait_until
from tests.support.processes.scripted_processes import (
    ScriptedEngine,
    ScriptedGeneration,
    give_version,
    start_scripted_engines,
)
from tests.support.rollout.engine_checks import actor_pid, group_request

pytestmark = [pytest.mark.slow, pytest.mark.fault, pytest.mark.usefixtures("local_ray")]


class EndlessGeneration(ScriptedGeneration):
    """A generation whose groups end by a stop only."""

    def _ended(self) -> list[int]:
        return []


class EndlessEngine(ScriptedEngine):
    def _reset_generation(self) -> None:
        self._generation = EndlessGeneration()

    async def _answer_one(self) -> None:
        """Return None: no request would end."""

    async def rest(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    # the groups of this file make no progress
    settings = {"actor_class": EndlessEngine, "engine_progress_timeout_s": 60.0}
    started = start_scripted_engines(3, tmp_path, **settings)
    yield started
    started.shutdown()


@contextmanager
def waiting(engines: Engines) -> Iterator[Future[list[OpenGroup]]]:
    """Wait for groups in another thread during the block."""
    engines.submit([group_request(key, (1,), (key, key + 1)) for key in range(6)])
    ended, deadline = threading.Event(), time.monotonic() + 20.0

    def wait() -> list[OpenGroup]:
        while not ended.is_set() and engines.num_in_flight and time.monotonic() < deadline:
            assert engines.finished(timeout_s=5.0) == []
        return []

    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(wait)
        time.sleep(0.3)  # until it waits
        yield future
        ended.set()
        engines.stop(keep=False)
        future.result(timeout=10.0)


def test_waiting_thread_keeps_no_other_one_out(engines):
    """The lock is unfair: a thread that waits with it would delay a publication by seconds."""
    with waiting(engines) as future:
        started = time.monotonic()
        for _ in range(5):
            engines.activity()
        report = engines.stop(keep=True)
        assert time.monotonic() - started < 1.0
        assert report.keys == tuple(range(6)) and engines.num_in_flight == 0
        assert future.result(timeout=5.0) == []


def test_engine_that_two_threads_find_dead_is_restarted_once(engines):
    with waiting(engines):
        refs = engines.call("rest", dict.fromkeys(range(3), (3.0,)))
        os.kill(actor_pid(engines, 1), signal.SIGKILL)
        assert sorted(engines.gather(refs, doing="rest", timeout_s=20.0)) == [0, 2]
        (note,) = engines.drain_warnings()
        assert note.startswith("rollout engine 1 died") and "restart 1 of 3" in note
        assert engines.call("rest", {1: (0.0,)}) == {} or engines.incarnation(1) == (1, 2)
        wait_until(lambda: engines.incarnation(1) == (1, 2) and len(engines.updatable()) == 3)


def test_engine_restarted_during_an_update_waits_for_its_end(engines):
    """It is not connected: an update that reached it would fail, or two would run at once."""
    republished: list[int] = []

    def republish(index: int) -> None:
        republished.append(index)
        give_version(engines, [index], 2)

    engines.finish_weight_update(range(3), 2, timeout_s=30, republish=republish)
    peers = UpdatePeers([], "weight_sender", engines, 20.0)
    with waiting(engines):
        with engines.publishing():
            peers.target(engines.updatable())
            os.kill(actor_pid(engines, 1), signal.SIGKILL)
            wait_until(lambda: engines.incarnation(1) == (1, 2) and len(engines.updatable()) == 3)
            time.sleep(0.5)
            assert peers.targets == [0, 2] and republished == []
            assert sorted(peers.call_engines("node", doing="test")) == [0, 2]
        wait_until(lambda: republished)
        assert republished == [1]
