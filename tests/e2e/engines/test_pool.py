"""Dead and hung engines, as real processes without vLLM, which start in a second.

`tests/e2e/sync/test_sync_faults.py` has the same with vLLM, in whole runs.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
import ray
import torch

from megadapo.cluster.calls import Watch
from megadapo.errors import InfraError
from megadapo.rollout.pool import handle as handles
from megadapo.rollout.pool.engines import LEAVE_TIMEOUT_S, Engines
from megadapo.rollout.pool.publish import Publisher
from megadapo.rollout.types import OpenGroup, ScoreRequest
from megadapo.weights.config import WeightsConfig
from tests.support.processes.running import wait_until
from tests.support.processes.scripted_processes import (
    TOO_LONG,
    EndlessEngine,
    LateEngine,
    give_version,
    start_scripted_engines,
)
from tests.support.rollout.engine_checks import actor_pid, all_finished, bits, group_request

pytestmark = [pytest.mark.fault, pytest.mark.usefixtures("local_ray")]

NUM_SLOTS = 10
"""Capacity of an idle engine."""


@pytest.fixture(scope="module")
def three(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    started = start_scripted_engines(3, tmp_path_factory.mktemp("logs"))
    yield started
    started.shutdown()


@pytest.fixture
def engines(three: Engines) -> Iterator[Engines]:
    """Three engines that serve, as if they had never restarted."""
    yield three
    make_new(three)


def make_new(engines: Engines) -> None:
    engines.stop(keep=False)
    wait_until_all_serve(engines)
    engines.drain_warnings()
    for handle in engines.handles.values():
        handle._restarts.clear()


def requests(count: int) -> list[OpenGroup]:
    return [group_request(key, (1,), tuple(range(key, key + 4))) for key in range(count)]


def answers(engines: Engines) -> dict:
    found = list(all_finished(engines))
    assert len({one.key for one in found}) == len(found), "a group was returned twice"
    return bits({one.key: one.responses for one in found})


def wait_until_all_serve(engines: Engines) -> None:
    check_until(lambda: engines.capacity == 3 * NUM_SLOTS, engines)


def check_until(condition: Callable[[], object], engines: Engines) -> None:
    def is_met() -> object:
        engines.check()
        return condition()

    wait_until(is_met)


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_dead_engine_restarts_and_its_groups_are_generated(engines, how):
    """No group is lost, doubled or changed, slots become free again, and no process stays."""
    engines.submit(requests(60))
    expected = answers(engines)
    before = [engines.incarnation(index) for index in range(3)]
    pid = actor_pid(engines, 1)
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    assert len(processes) == 2
    engines.submit(requests(60))
    early = engines.finished()
    os.kill(pid, how)
    late = answers(engines)
    assert late | bits({one.key: one.responses for one in early}) == expected
    wait_until_all_serve(engines)
    assert [engines.incarnation(i) == before[i] for i in range(3)] == [True, False, True]
    (note,) = engines.drain_warnings()
    cause = "died" if how == signal.SIGKILL else "no token for 6 s"
    assert note.startswith("rollout engine 1 ") and cause in note and "restart 1 of 3" in note
    assert engines.drain_warnings() == []
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []


@pytest.mark.slow
def test_hung_idle_engine_is_found_and_its_stack_saved(engines):
    """It is found while the trainer works, before the next step waits for it."""
    place, pid = engines.incarnation(2), actor_pid(engines, 2)
    os.kill(pid, signal.SIGSTOP)
    check_until(lambda: engines.incarnation(2) != place, engines)
    (note,) = engines.drain_warnings()
    log = engines.handles[2].spec.log_file
    assert note.startswith("rollout engine 2 sent no heartbeat for 6 s")
    assert f"stacks: {log}; restart 1 of 3" in note
    assert "most recent call first" in log.read_text()


def test_stop_reports_every_group(engines):
    """This holds even if the engine dies at that moment."""
    engines.submit(requests(30))
    report = engines.stop(keep=True)
    assert report.keys == tuple(range(30)) and engines.num_in_flight == 0
    assert {one.key for one in report.unfinished} == set(range(30))
    engines.submit(requests(30))
    assert engines.stop({1, 2, 99}, keep=False).keys == (1, 2)
    assert sorted(answers(engines)) == [0, *range(3, 30)]
    engines.submit(requests(30))
    os.kill(actor_pid(engines, 0), signal.SIGKILL)
    report = engines.stop(keep=True)
    assert {one.key for one in report.unfinished} == set(range(30))
    # a group that was lost with its engine starts from the prompt again
    assert {len(one.responses) for one in report.unfinished} <= {0, 4}
    assert engines.num_in_flight == 0


def test_lost_engine_is_left_out_of_scores(engines):
    """The step continues with the scores of the others, and says which weights it did not see."""
    request = ScoreRequest(token_ids=(4, 5, 6), positions=np.array([1, 2]), temperature=1.0)
    assert len(engines.score([request]).result()) == 3
    engines.submit(requests(60))
    pending = engines.score([request, request])
    os.kill(actor_pid(engines, 0), signal.SIGKILL)
    os.kill(actor_pid(engines, 1), signal.SIGSTOP)
    (scores,) = pending.result()
    assert [one.tolist() for one in scores] == [[1.0, 2.0]] * 2
    notes = [note for note in engines.drain_warnings() if "are not compared" in note]
    assert [note[:16] for note in notes] == ["rollout engine 0", "rollout engine 1"]
    assert len(answers(engines)) == 60


def test_refused_request_is_an_error_without_restart(engines):
    """A restart would repeat the request and end all engines one after another."""
    engines.submit([*requests(3), group_request(9, (1,) * (TOO_LONG + 1), (1, 2))])
    with pytest.raises(InfraError, match="too long"):
        answers(engines)
    engines.stop(keep=False)
    assert engines.drain_warnings() == [] and engines.num_in_flight == 0


def test_restarted_engine_waits_for_the_update(engines):
    """The trainer's weights in mid-step belong to no version and must not be published."""
    engines.on_update_start()
    os.kill(actor_pid(engines, 2), signal.SIGKILL)
    check_until(engines.drain_warnings, engines)
    check_until(lambda: 2 in engines.updatable(), engines)
    engines.submit(requests(30))
    assert len(answers(engines)) == 30
    assert engines.capacity == 2 * NUM_SLOTS
    give_version(engines, engines.updatable(), 2)
    assert engines.capacity == 3 * NUM_SLOTS
    engines.submit(requests(30))
    versions = {
        v for one in all_finished(engines) for r in one.responses for v in r.policy_versions
    }
    assert versions == {2}


def use_up_restarts(engines):
    for handle in engines.handles.values():
        for _ in range(handles.MAX_RESTARTS):
            handle.plan_restart()


def test_without_restarts_the_last_death_ends_the_run(tmp_path):
    engines = start_scripted_engines(2, tmp_path)
    use_up_restarts(engines)
    engines.submit(requests(20))
    os.kill(actor_pid(engines, 1), signal.SIGKILL)
    assert len(answers(engines)) == 20
    (note,) = engines.drain_warnings()
    assert "not restarted: the limit" in note and engines.updatable() == [0]
    engines.submit(requests(20))
    os.kill(actor_pid(engines, 0), signal.SIGKILL)
    with pytest.raises(InfraError, match="rollout engine 0 .*no engine is left"):
        answers(engines)
    engines.shutdown()


@pytest.mark.slow
def test_restarts_come_back_with_time(engines, monkeypatch):
    """Catches a limit for the life of a driver: after two weeks every loss would be for good."""
    monkeypatch.setattr(handles, "RESTART_WINDOW_S", 12.0)
    monkeypatch.setattr(handles, "MAX_RESTARTS", 1)
    first_death, process = time.monotonic(), engines.incarnation(1)
    os.kill(actor_pid(engines, 1), signal.SIGKILL)
    check_until(lambda: engines.incarnation(1) != process, engines)
    (note,) = engines.drain_warnings()
    assert "restart 1 of 1 an hour" in note
    check_until(lambda: 1 in engines.updatable(), engines)
    process = engines.incarnation(1)
    os.kill(actor_pid(engines, 1), signal.SIGKILL)
    check_until(lambda: 1 not in engines.updatable(), engines)
    (note,) = engines.drain_warnings()
    assert "not restarted: the limit of 1 an hour is reached for" in note
    engines.submit(requests(30))
    assert len(answers(engines)) == 30
    check_until(lambda: engines.incarnation(1) != process, engines)
    assert time.monotonic() - first_death > 12.0


@pytest.mark.slow
def test_less_than_half_of_the_engines_ends_the_run(tmp_path):
    """Catches a run of weeks with a fraction of its engines."""
    engines = start_scripted_engines(3, tmp_path)
    use_up_restarts(engines)
    os.kill(actor_pid(engines, 1), signal.SIGKILL)
    check_until(lambda: 1 not in engines.updatable(), engines)
    os.kill(actor_pid(engines, 0), signal.SIGKILL)
    with pytest.raises(InfraError, match="only 1 of 3 engines are left, and a restart of the run"):
        check_until(lambda: 0 not in engines.updatable(), engines)
    engines.shutdown()


def test_run_neither_waits_nor_ends_late_for_an_engine_that_starts(tmp_path):
    """The imports of two engines kept a run on two cores from its first rollout."""
    engines = start_scripted_engines(1, tmp_path, actor_class=LateEngine)
    engines.join(1, (), {"num_cpus": 0})
    process = psutil.Process(actor_pid(engines, 1))
    engines.submit(requests(20))
    assert len(answers(engines)) == 20
    begun = time.monotonic()
    engines.shutdown()
    assert time.monotonic() - begun < LEAVE_TIMEOUT_S
    assert psutil.wait_procs([process], timeout=20)[1] == []


def test_driver_watches_the_trainer_while_waiting(tmp_path):
    """Otherwise a trainer that dies in a long rollout is found only at the update."""
    errors = [InfraError("trainer rank 1 died")]

    def died_once() -> None:
        if errors:
            raise errors.pop()

    engines = start_scripted_engines(1, tmp_path, watch=Watch(died_once))
    engines.submit(requests(30))
    with pytest.raises(InfraError, match="trainer rank 1 died"):
        answers(engines)
    assert len(answers(engines)) == 30
    engines.shutdown()
    assert ray.is_initialized()


@pytest.fixture(scope="module")
def endless_three(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    # their groups make no progress
    settings = {"actor_class": EndlessEngine, "engine_progress_timeout_s": 60.0}
    started = start_scripted_engines(3, tmp_path_factory.mktemp("logs"), **settings)
    yield started
    started.shutdown()


@pytest.fixture
def endless(endless_three: Engines) -> Iterator[Engines]:
    yield endless_three
    make_new(endless_three)


@contextmanager
def waiting(engines: Engines) -> Iterator[Future[list[OpenGroup]]]:
    """Let another thread wait for groups during the block, which publishes or stops."""
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


@pytest.mark.slow
def test_waiting_thread_keeps_no_other_one_out(endless):
    """The lock is unfair: a thread that waits with it would delay a publication by seconds."""
    with waiting(endless) as future:
        started = time.monotonic()
        for _ in range(5):
            endless.activity()
        report = endless.stop(keep=True)
        assert time.monotonic() - started < 1.0
        assert report.keys == tuple(range(6)) and endless.num_in_flight == 0
        assert future.result(timeout=5.0) == []


@pytest.mark.slow
def test_engine_that_two_threads_find_dead_is_restarted_once(endless):
    with waiting(endless):
        number, num_starts = endless.incarnation(1)
        again = (number, num_starts + 1)
        refs = endless.call("rest", dict.fromkeys(range(3), (3.0,)))
        os.kill(actor_pid(endless, 1), signal.SIGKILL)
        assert sorted(endless.gather(refs, doing="rest", timeout_s=20.0)) == [0, 2]
        (note,) = endless.drain_warnings()
        assert note.startswith("rollout engine 1 died") and "restart 1 of 3" in note
        assert endless.call("rest", {1: (0.0,)}) == {} or endless.incarnation(1) == again
        wait_until(lambda: endless.incarnation(1) == again and len(endless.updatable()) == 3)


@pytest.mark.slow
def test_engine_restarted_during_an_update_waits_for_its_end(endless):
    """It is not connected: an update that reached it would fail, or two would run at once."""
    republished: list[int] = []

    def republish(index: int) -> None:
        republished.append(index)
        give_version(endless, [index], 2)

    endless.finish_weight_update(range(3), 2, timeout_s=30, republish=republish)
    config = WeightsConfig(deadline_s=20.0)
    publisher = Publisher([], endless, config, tensor_parallel=1, dtype=torch.float32)
    with waiting(endless):
        with endless.publishing():
            publisher._targets = publisher._incarnations(endless.updatable())
            before = endless.incarnation(1)
            os.kill(actor_pid(endless, 1), signal.SIGKILL)
            wait_until(lambda: endless.incarnation(1) != before and len(endless.updatable()) == 3)
            time.sleep(0.5)
            assert publisher._updating == [0, 2] and republished == []
            assert sorted(publisher._call_engines("node", doing="test")) == [0, 2]
        wait_until(lambda: republished)
        assert republished == [1]
