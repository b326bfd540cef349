"""Engines join and leave a pool of real processes without vLLM, which start in a second."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from megadapo.rollout.pool import elastic
from megadapo.rollout.pool.elastic import ElasticEngines
from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.pool.request import REQUEST_FILE, EngineRequest, write_request
from megadapo.rollout.types import OpenGroup, ScoreRequest
from tests.support.processes.running import wait_until
from tests.support.processes.scripted_processes import give_version, start_scripted_engines
from tests.support.rollout.elastic_places import Places
from tests.support.rollout.engine_checks import actor_pid, all_finished, bits, group_request

pytestmark = pytest.mark.usefixtures("local_ray")

DRIVER = "this driver"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(elastic, "CHECK_S", 0.1)


class Elastic:
    """Two engines, on the nodes a and b, that a test may change."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.places = folder, Places(["a", "b"])
        self.engines: Engines = start_scripted_engines(2, folder)
        self.reports: list[dict] = [{}]
        self.control = ElasticEngines(
            self.engines,
            self.places,
            folder,
            driver=DRIVER,
            num_engines=2,
            num_ranks=1,
            next_number=2,
            report=self.reports.append,
        )

    def want(self, num_engines: int, **request) -> None:
        request = EngineRequest(num_engines=num_engines, driver=DRIVER, **request)
        write_request(self.folder, request)

    def check_until(self, condition: Callable[[], object]) -> None:
        def is_met() -> object:
            self.engines.check()
            self.control.check()
            return condition()

        wait_until(is_met, timeout_s=30)

    def states(self) -> dict[int, str]:
        return {one["number"]: one["state"] for one in self.reports[-1].get("engines", ())}

    def state_of(self, number: int) -> str | None:
        return self.states().get(number)

    def generate(self, count: int = 60) -> dict:
        """Return the responses of groups that are generated while requests are followed."""
        self.engines.submit(requests(count))
        return self.finish()

    def finish(self) -> dict:
        found = []
        while self.engines.num_in_flight:
            found += self.engines.finished(timeout_s=0.1)
            self.control.check()
        assert len({one.key for one in found}) == len(found), "a group was returned twice"
        return bits({one.key: one.responses for one in found})


def requests(count: int) -> list[OpenGroup]:
    return [group_request(key, (1,), tuple(range(key, key + 4))) for key in range(count)]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Elastic]:
    found = Elastic(tmp_path)
    yield found
    found.control.close()
    found.engines.shutdown()


@pytest.mark.slow
def test_engine_joins_while_others_generate(pool, monkeypatch):
    """It waits for a place that works, gets the weights at once, and changes no response."""
    monkeypatch.setattr(elastic, "RETRY_S", 0.5)
    expected = pool.generate()
    pool.want(3)
    pool.check_until(lambda: pool.reports[-1].get("waiting_for_slots") == 1)
    assert pool.generate() == expected
    pool.places.free = ["broken", "c"]
    pool.engines.submit(requests(60))
    found = pool.finish()
    assert found == expected
    pool.check_until(lambda: pool.states() == {0: "serving", 1: "serving", 2: "serving"})
    assert pool.places.nodes == {0: "a", 1: "b", 2: "c"}
    assert pool.reports[-1].get("waiting_for_slots") == 0
    before = pool.engines.handles[2].num_tokens
    assert pool.generate() == expected
    pool.check_until(lambda: pool.engines.handles[2].num_tokens > before)
    assert pool.engines.drain_warnings() == [
        "no rollout engine joins: node broken: the model does not exist",
        "rollout engine 2 joins on c",
    ]


@pytest.mark.parametrize(
    "any_time",
    [pytest.param(False, id="own weights", marks=pytest.mark.slow), pytest.param(True, id="kept")],
)
def test_engine_that_joins_during_an_update_gets_no_unfinished_weights(pool, any_time):
    """The trainer's weights in mid-step belong to no version; kept ones can be sent at any time."""
    give_version(pool.engines, [0, 1], 1, any_time=any_time)
    pool.engines.on_update_start()
    pool.want(3)
    pool.places.free = ["c"]
    state = "serving" if any_time else "waiting for weights"
    pool.check_until(lambda: pool.state_of(2) == state)
    with pool.engines.publishing():
        give_version(pool.engines, pool.engines.updatable(), 2, any_time=any_time)
    pool.check_until(lambda: pool.states()[2] == "serving")
    pool.engines.submit(requests(60))
    versions = {
        int(v)
        for one in all_finished(pool.engines)
        for r in one.responses
        for v in r.policy_versions
    }
    assert versions == {2}


def test_nothing_changes_during_a_publication(pool):
    """Catches engines that leave or get weights in the middle of an update, in any thread."""
    give_version(pool.engines, [0, 1], 1, any_time=True)
    pool.want(3)
    pool.places.free = ["c"]
    pool.control.check()
    with pool.engines.publishing():
        before = len(pool.reports)
        pool.want(1)
        wait_until(lambda: pool.engines.check() or 2 in pool.engines.updatable(), timeout_s=30)
        pool.engines.check()
        for _ in range(3):
            pool.control.check()
            thread = threading.Thread(target=pool.control.check)
            thread.start()
            thread.join()
        assert len(pool.reports) == before
        assert pool.engines.handles[2].shown_state == "waiting for weights"
        give_version(pool.engines, [0, 1], 2, any_time=True)
    pool.check_until(lambda: len(pool.places.released) == 2)


def test_engine_leaves_when_its_groups_are_done(pool):
    """Until then it is not probed: it gets no weights, so its scores would be of earlier ones."""
    expected = pool.generate()
    process = psutil.Process(actor_pid(pool.engines, 1))
    pool.engines.submit(requests(60))
    pool.want(1)
    pool.check_until(lambda: pool.state_of(1) == "leaving")
    request = ScoreRequest(token_ids=(1, 2), positions=np.array([1]), temperature=1.0)
    assert len(pool.engines.score([request]).result()) == 1
    assert pool.finish() == expected
    pool.check_until(lambda: pool.places.released == [1])
    assert pool.states() == {0: "serving"} and pool.places.nodes == {0: "a"}
    psutil.wait_procs([process], timeout=20)
    assert not process.is_running()
    assert pool.generate() == expected
    assert pool.engines.drain_warnings() == [
        "rollout engine 1 leaves within 600 s",
        "rollout engine 1 has left",
    ]


def test_groups_of_an_engine_that_must_go_are_generated_by_others(pool):
    """They start as they were submitted: a cut at a token would change the noise after it."""
    expected = pool.generate()
    pool.want(1, leave=(0,), within_s=0.0)
    pool.engines.submit(requests(60))
    pool.check_until(lambda: pool.places.released == [0])
    assert pool.finish() == expected
    # one was named and is not replaced, since only one is wanted
    assert pool.places.nodes == {1: "b"}


@pytest.mark.slow
def test_last_serving_engine_leaves_after_another_one_serves(pool):
    """A run without an engine would wait for nothing."""
    pool.want(1, leave=(0, 1), within_s=0.0)
    pool.check_until(lambda: "leaves when another one serves" in pool.states().values())
    expected = pool.generate()
    pool.places.free = ["c"]
    pool.check_until(lambda: pool.states() == {2: "serving"})
    assert sorted(pool.places.released) == [0, 1]
    assert pool.generate() == expected


@pytest.mark.slow
def test_lost_node_is_replaced_by_another_one(pool):
    """A joined node has other GPUs, so an engine cannot restart in the old place."""
    expected = pool.generate()
    pool.engines.submit(requests(60))
    pool.places.alive.discard("b")
    os.kill(actor_pid(pool.engines, 1), signal.SIGKILL)
    pool.check_until(lambda: pool.places.released == [1])
    assert pool.finish() == expected
    assert pool.reports[-1].get("waiting_for_slots") == 1
    pool.places.free = ["c"]
    pool.check_until(lambda: pool.states() == {0: "serving", 2: "serving"})
    assert pool.generate() == expected
    warnings = pool.engines.drain_warnings()
    assert "rollout engine 1 is gone with its node b; another one starts" in " ".join(warnings)


def test_node_that_will_end_is_left_and_its_engines_replaced(pool):
    """The notice names a node; another engine must not start on it again."""
    pool.want(2, leave_nodes=("b",), within_s=0.0)
    pool.places.free = ["b"]
    pool.check_until(lambda: pool.places.released == [1])
    pool.check_until(lambda: pool.reports[-1].get("waiting_for_slots") == 1)
    pool.places.free.append("c")
    pool.check_until(lambda: pool.states() == {0: "serving", 2: "serving"})
    assert pool.places.nodes == {0: "a", 2: "c"}


@pytest.mark.slow
def test_withdrawn_or_damaged_request_changes_nothing(pool):
    expected = pool.generate()
    pool.want(4)
    pool.check_until(lambda: pool.reports[-1].get("waiting_for_slots") == 2)
    (pool.folder / REQUEST_FILE).unlink()
    pool.check_until(lambda: pool.reports[-1].get("waiting_for_slots") == 0)
    pool.places.free = ["c"]
    pool.control.check()
    assert sorted(pool.places.nodes) == [0, 1]
    pool.want(1, within_s=600.0)
    (pool.folder / REQUEST_FILE).write_text('{"num_engines": 0}')
    pool.check_until(lambda: pool.reports[-1].get("problem"))
    assert "num_engines: Input should be greater than or equal to 1" in pool.reports[-1]["problem"]
    time.sleep(0.3)
    assert pool.generate() == expected
    pool.check_until(lambda: pool.states() == {0: "serving", 1: "serving"})
    assert len(pool.engines.drain_warnings()) == 1
