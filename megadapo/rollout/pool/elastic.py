"""Engines join and leave during a run, until it has the engines that `engines.json` asks for.

Which engine generates a group changes no response, so none of this changes what a run learns.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadapo.cluster.places import PlaceRequest
from megadapo.errors import DataError, InfraError
from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.pool.handle import EngineHandle, State
from megadapo.rollout.pool.request import EngineRequest, read_request

if TYPE_CHECKING:
    from megadapo.cluster.cluster import Cluster

CHECK_S = 2.0
"""Shortest time between two looks at the request."""
RETRY_S = 30.0
"""Seconds after a place that failed until another one is requested."""
RATE_S = 30.0
"""Seconds over which an engine's speed is measured."""


class ElasticEngines:
    """The engines of a run, kept at the number that is wanted.

    Args:
        engines: the pool; it must have places of its own, not those of the trainer.
        folder: the run's folder.
        driver: identifies this driver in requests.
        num_engines: number of engines without a request.
        num_ranks: ranks of an engine.
        report: receives the state of the engines, for status.json.
    """

    def __init__(
        self,
        engines: Engines,
        places: Cluster,
        folder: Path,
        *,
        driver: str,
        num_engines: int,
        num_ranks: int,
        next_number: int,
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        self._engines, self._places, self._folder = engines, places, folder
        self._driver, self._num_ranks, self._next_number = driver, num_ranks, next_number
        self._report = report
        self._checking, self._is_closed = threading.Lock(), False
        self._request = self._default = EngineRequest(num_engines=num_engines)
        self._problem: str | None = None
        """Reason why the present request is not followed."""
        self._waiting: list[PlaceRequest] = []
        self._postponed: set[int] = set()
        """Engines that leave when another one serves."""
        self._ask_at = self._check_at = 0.0
        self._tokens: dict[int, deque[tuple[float, int]]] = {}

    def check(self) -> None:
        """Compare the engines with the request, and start and end some; any thread may call it."""
        now = time.monotonic()
        if now < self._check_at or not self._checking.acquire(blocking=False):
            return
        try:
            alive = self._places.alive_nodes()
            if self._is_closed or alive is None:
                return
            # a slow disk must not keep the engines, so their pool is not held meanwhile
            self._read()
            with self._engines.unless_busy() as is_free:
                if not is_free:
                    return
                self._forget_lost(alive)
                self._drop_failed(now)
                self._leave()
                self._join(now)
                view = self._view(now)
            self._check_at = now + CHECK_S
            self._report(view)
        finally:
            self._checking.release()

    def close(self) -> None:
        """Withdraw the requests for places, and change nothing any more."""
        self._is_closed = True
        for waiting in self._waiting:
            waiting.cancel()
        self._waiting = []

    def _read(self) -> None:
        """Read the request; one that is damaged changes nothing."""
        try:
            request = read_request(self._folder)
        except DataError as error:
            self._note(str(error))
            return
        self._request = self._default if request is None else request.for_driver(self._driver)
        self._note(None)

    def _note(self, problem: str | None) -> None:
        if problem is not None and problem != self._problem:
            self._engines.warn(problem)
        self._problem = problem

    def _forget_lost(self, alive: Collection[str]) -> None:
        """Forget engines whose node is gone; others replace them on nodes with free slots."""
        for number, engine in self._engines.handles.items():
            node = self._places.engine_node(number)
            if node in alive or engine.state in (State.STALE, State.SERVING):
                continue
            lost = f"rollout engine {number} is gone with its node {node}"
            if self._engines.staying in ([], [engine]):
                raise InfraError(f"{lost}; no engine is left, and a restart of the run starts all")
            self._engines.forget(number)
            self._places.release_engine(number)
            self._engines.warn(f"{lost}; another one starts when a node has free slots")

    def _drop_failed(self, now: float) -> None:
        """Remove engines that joined and cannot start, and ask for other places later."""
        for engine in self._engines.staying:
            if engine.has_failed:
                engine.leave(within_s=0.0)
                self._ask_at = now + RETRY_S
                self._engines.warn(
                    f"{engine.name} cannot start on node "
                    f"{self._places.engine_node(engine.number)} and is removed, see "
                    f"{engine.spec.log_file}; another place is requested in {RETRY_S:g} s"
                )

    def _chosen(self) -> list[EngineHandle]:
        """Return the engines that should leave: the named ones, and the last ones above the number
        that is wanted."""
        request, staying = self._request, self._engines.staying
        chosen = [
            engine
            for engine in staying
            if engine.number in request.leave
            or self._places.engine_node(engine.number) in request.leave_nodes
        ]
        others = [engine for engine in staying if engine not in chosen]
        surplus = len(others) + len(self._waiting) - request.num_engines
        while surplus > 0 and self._waiting:
            self._waiting.pop().cancel()
            surplus -= 1
        others.sort(key=lambda one: (one.state is State.SERVING, -one.number))
        return chosen + others[: max(0, surplus)]

    def _leave(self) -> None:
        within_s = self._request.within_s
        self._postponed = set()
        for engine in self._chosen():
            serving = [one for one in self._engines.staying if one.state is State.SERVING]
            if serving in ([], [engine]):
                self._postponed.add(engine.number)
                continue
            engine.leave(within_s)
            self._engines.warn(f"{engine.name} leaves within {within_s:g} s")
        for number in self._engines.finish_leaving():
            self._places.release_engine(number)
            self._tokens.pop(number, None)
            self._engines.warn(f"rollout engine {number} has left")

    def _join(self, now: float) -> None:
        num_staying = len(self._engines.staying) - len(self._postponed)
        missing = self._request.num_engines - num_staying - len(self._waiting)
        if missing > 0 and now >= self._ask_at:
            nodes = self._request.leave_nodes
            self._waiting += [
                self._places.request_engine(self._num_ranks, without=nodes) for _ in range(missing)
            ]
        still_waiting = []
        for waiting in self._waiting:
            try:
                place = waiting.poll()
            except InfraError as error:
                self._ask_at = now + RETRY_S
                self._engines.warn(f"no rollout engine joins: {error}")
                continue
            if place is None:
                still_waiting.append(waiting)
                continue
            number, self._next_number = self._next_number, self._next_number + 1
            self._places.add_engine(number, place)
            self._engines.join(number, place.gpus, place.options())
            self._engines.warn(f"rollout engine {number} joins on {place.node}")
        self._waiting = still_waiting

    def _view(self, now: float) -> dict[str, Any]:
        return {
            "wanted": self._request.num_engines,
            "problem": self._problem,
            "waiting_for_slots": len(self._waiting),
            "trainer_nodes": self._places.trainer_nodes(),
            "engines": [
                {
                    "number": number,
                    "node": self._places.engine_node(number),
                    "state": "leaves when another one serves"
                    if number in self._postponed
                    else engine.shown_state,
                    "load": engine.load,
                    "tokens": engine.num_tokens,
                    "tokens_per_s": self._rate(engine, now),
                }
                for number, engine in self._engines.handles.items()
            ],
        }

    def _rate(self, engine: EngineHandle, now: float) -> float | None:
        """Return an engine's tokens per second in the last seconds; None if not known yet."""
        seen = self._tokens.setdefault(engine.number, deque())
        if seen and engine.num_tokens < seen[-1][1]:
            seen.clear()  # another process
        seen.append((now, engine.num_tokens))
        while now - seen[0][0] > RATE_S:
            seen.popleft()
        seconds = now - seen[0][0]
        return round((engine.num_tokens - seen[0][1]) / seconds, 1) if seconds else None
