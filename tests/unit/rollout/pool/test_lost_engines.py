"""Engines that are lost or cannot start, in a pool without processes: which of them end a run."""

import time

import pytest
import ray

from megadapo.errors import InfraError
from megadapo.rollout.config import RolloutConfig
from megadapo.rollout.pool.elastic import ElasticEngines
from megadapo.rollout.pool.engines import UNASSIGNED, Engines
from megadapo.rollout.pool.handle import DEPARTING, EngineHandle, State
from megadapo.rollout.pool.request import EngineRequest, write_request
from tests.support.rollout.elastic_places import Places
from tests.support.rollout.engine_checks import group_request
from tests.support.rollout.engine_specs import engine_spec

DRIVER = "this driver"


class Handle(EngineHandle):
    """A handle whose process starts when a test says so, and ends at once."""

    def start(self):
        self.state = State.STARTING
        self.awaited = self.actor = None
        self.num_starts, self.submits, self.num_tokens = self.num_starts + 1, {}, 0
        self._num_asked = self._num_ended = self._num_waiting = 0

    def started(self):
        self.state = State.STALE
        self.serve()

    def end(self, *, hangs=False):
        self.state = State.GONE if self.state in DEPARTING else State.ENDED

    def submit(self, groups):
        pass

    def start_another(self, index, gpus, options):
        return make_handle(index)


def make_handle(index):
    handle = Handle(engine_spec(index=index, config=RolloutConfig()), {})
    handle.is_new = True
    return handle


def serving(index):
    handle = make_handle(index)
    handle.started()
    return handle


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    return Engines([serving(0), serving(1)])


@pytest.fixture
def elastic(pool, tmp_path):
    def follow(num_engines, **request):
        request = EngineRequest(num_engines=num_engines, driver=DRIVER, **request)
        write_request(tmp_path, request)
        control._check_at = 0.0
        control.check()

    places = Places(["a", "b"])
    places.free = ["c"] * 9
    control = ElasticEngines(
        pool,
        places,
        tmp_path,
        driver=DRIVER,
        num_engines=2,
        num_ranks=1,
        next_number=2,
        report=lambda view: None,
    )
    control.places, control.follow = places, follow
    return control


def fail(pool, *numbers):
    for number in numbers:
        pool.mark_dead(pool.handles[number], f"rollout engine {number}: no such model")
        pool.handles[number].start()


def test_engines_that_join_and_cannot_start_are_given_up(pool, elastic):
    """They counted as lost, so a healthy run ended, and again after each restart."""
    elastic.follow(5)
    assert elastic.places.nodes == {0: "a", 1: "b", 2: "c", 3: "c", 4: "c"}
    for _ in range(4):
        fail(pool, 2, 3, 4)
        elastic.follow(5)
    warnings = pool.drain_warnings()
    for number in (2, 3, 4):
        assert (
            f"rollout engine {number} cannot start on node c and is removed, see engine-0.log; "
            "another place is requested in 30 s"
        ) in warnings
    elastic.follow(5)
    assert [*pool.handles] == [0, 1]
    assert elastic.places.nodes == {0: "a", 1: "b"}


def test_joined_engine_that_has_served_counts(pool, elastic):
    """Catches engines that join and are never missed."""
    elastic.follow(5)
    for number in (2, 3, 4):
        pool.handles[number].started()
    for _ in range(3):
        fail(pool, 2, 3, 4)
    fail(pool, 2, 3)
    with pytest.raises(InfraError, match="only 2 of 5 engines are left"):
        fail(pool, 4)


def test_engines_that_never_served_count_if_there_are_no_others(pool, elastic):
    """The run would wait for them without end."""
    elastic.follow(3)
    pool.handles = {2: pool.handles[2]}
    for _ in range(3):
        fail(pool, 2)
    with pytest.raises(InfraError, match="no engine is left"):
        fail(pool, 2)


def test_engine_that_leaves_does_not_replace_a_lost_one(pool, elastic):
    """The lost one was forgotten, the other one left, and the run waited for nothing."""
    pool.submit([group_request(1, (1,), (1, 2))])
    elastic.follow(1, leave=(0,))
    assert [one.shown_state for one in pool.handles.values()] == ["leaving", "serving"]
    pool.handles[1].end()
    elastic.places.alive = {"a", "c"}
    with pytest.raises(InfraError, match="engine 1 is gone with its node b; no engine is left"):
        elastic.follow(1, leave=(0,))


def test_engine_that_does_not_serve_yet_leaves_first(pool, elastic):
    """A serving one left instead, and the run waited for the start of the other one."""
    elastic.follow(3)
    elastic.follow(2)
    assert [one.number for one in pool.staying] == [0, 1]


def test_speed_of_a_restarted_engine_is_of_its_own_tokens(pool, elastic):
    """Its count begins again at 0, which would show as a negative speed."""
    engine, rates = pool.handles[0], []
    for engine.num_tokens, now in ((100, 0.0), (300, 2.0), (50, 4.0), (150, 5.0)):
        rates.append(elastic._rate(engine, now))
    assert rates == [None, 100.0, None, 100.0]


def test_pool_without_a_process_waits_for_its_time(pool, monkeypatch):
    """It looked for reports thousands of times a second."""
    pool.handles = {}
    pool._in_flight = {1: (group_request(1, (1,), (1, 2)), UNASSIGNED)}
    waits, wait = [], pool._wait
    monkeypatch.setattr(pool, "_wait", lambda seconds: waits.append(seconds) or wait(seconds))
    started = time.monotonic()
    assert pool.finished(0.2) == []
    assert time.monotonic() - started >= 0.2 and len(waits) <= 5
