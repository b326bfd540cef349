"""The groups in flight: which engine has each, and what becomes of them when one is lost."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np

from megadapo.errors import InfraError
from megadapo.rollout.fleet import WATCH_S, Fleet
from megadapo.rollout.remote_engine import Place
from megadapo.rollout.requests import (
    EngineReport,
    GroupRequest,
    GroupResponse,
    Response,
    StopReport,
)

NOWHERE: Place = (-1, 0)


class Dispatcher:
    """Deals groups out to engines and takes what they report; for one thread at a time.

    `check` may be called by another one.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.watch: Callable[[], None] | None = None
        """Called every few seconds while groups are waited for; may raise what ends the run."""
        self._fleet = fleet
        self._in_flight: dict[int, tuple[GroupRequest, Place]] = {}
        """By key, each group and the process that it is on."""
        self._homeless: list[GroupRequest] = []
        """Groups in flight that no engine has."""
        self._finished: dict[int, GroupResponse] = {}
        """Groups that have not been handed back yet; still in flight."""
        self._num_lost = 0
        self._watched = -math.inf
        self._lock = threading.RLock()

    @property
    def num_in_flight(self) -> int:
        """Groups submitted and not handed back."""
        return len(self._in_flight)

    def room_without(self, keys: Collection[int]) -> int:
        """Responses that may be submitted, as if the groups with these keys were not in flight."""
        left_out = Counter[Place]()
        for group, place in (self._in_flight[key] for key in keys):
            left_out[place] += len(group.seeds)
        # responses of these groups that have ended are no load any more
        return self._fleet.room(left_out)

    def submit(self, groups: Sequence[GroupRequest]) -> None:
        """Give groups to engines."""
        with self._lock:
            for group in groups:
                assert group.key not in self._in_flight, f"group {group.key} is in flight already"
                self._in_flight[group.key] = (group, NOWHERE)
            self._place([*self._homeless, *groups])

    def finished(self, timeout_s: float | None) -> list[GroupResponse]:
        """Wait for groups, for room or for the timeout."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self._in_flight and not self._finished:
            left = deadline - time.monotonic()
            self._look_around()
            has_news = self._wait(max(0.0, min(left, WATCH_S)))
            if left <= 0 or (has_news and self.room_without(())):
                break
        with self._lock:
            groups, self._finished = list(self._finished.values()), {}
            for group in groups:
                del self._in_flight[group.key]
        return groups

    def stop(self, keys: Collection[int] | None, *, keep: bool) -> StopReport:
        """End groups, all of them for None."""
        with self._lock:
            chosen = set(self._in_flight if keys is None else self._in_flight.keys() & set(keys))
            reports = self._stop_on_engines(chosen, keep=keep)
            told = {key for report in reports for key in report.keys}
            present = {engine.place for engine in self._fleet.serving}
            # the others finished before their engine knew, and are on their way
            coming = {key for key in chosen - told if self._in_flight[key][1] in present}
            requests = [self._forget(key) for key in chosen - coming - self._finished.keys()]
            while coming - self._finished.keys():
                self._look_around()
                self._wait(WATCH_S)
            complete = [group for key, group in self._finished.items() if key in chosen]
            requests += [self._forget(group.key) for group in complete]
        return _stop_report(requests, complete, reports, keep=keep)

    def alone(self) -> threading.RLock:
        """To be held over calls that another thread's `check` must not come between."""
        return self._lock

    def check(self) -> None:
        """Look after the engines, unless another thread does."""
        if self._lock.acquire(blocking=False):
            try:
                self._wait(0.0)
            finally:
                self._lock.release()

    def _place(self, groups: Sequence[GroupRequest]) -> None:
        """Give each group to the engine with the least to do."""
        serving = self._fleet.serving
        self._homeless = [] if serving else list(groups)
        shares: dict[int, list[GroupRequest]] = {}
        for group in groups if serving else ():
            engine = min(serving, key=lambda one: one.load)
            engine.assigned(len(group.seeds))
            self._in_flight[group.key] = (group, engine.place)
            shares.setdefault(engine.spec.index, []).append(group)
        for index, share in shares.items():
            self._fleet.slots[index].submit(share)

    def _look_around(self) -> None:
        if self.watch is not None and time.monotonic() - self._watched > WATCH_S:
            self.watch()
            self._watched = time.monotonic()

    def _wait(self, timeout_s: float) -> bool:
        """Take what the engines report within so many seconds; whether there was anything."""
        with self._lock:
            try:
                reports = self._fleet.wait(timeout_s)
            except InfraError:
                for group in self._fleet.refused:
                    self._in_flight.pop(group.key, None)
                self._fleet.refused = []
                raise
            self._finished.update(
                (group.key, group)
                for report in reports
                for group in report.groups
                if group.key in self._in_flight
            )
            self._place_again()
        return bool(reports)

    def _place_again(self) -> None:
        """Ask anew for what lost engines had."""
        if self._fleet.num_lost > self._num_lost:
            self._num_lost = self._fleet.num_lost
            present = {engine.place for engine in self._fleet.serving}
            self._homeless = [
                group
                for key, (group, place) in self._in_flight.items()
                if place not in present and key not in self._finished
            ]
        if self._homeless:
            self._place(self._homeless)

    def _stop_on_engines(self, chosen: Collection[int], *, keep: bool) -> list[StopReport]:
        """Stop groups where they are; what the engines say of them."""
        places = {self._in_flight[key][1] for key in chosen}
        busy = [engine for engine in self._fleet.serving if engine.place in places]
        arguments = {engine.spec.index: (set(chosen), keep) for engine in busy}
        answers: dict[int, tuple[StopReport, EngineReport]] = self._fleet.gather(
            self._fleet.call("stop", arguments),
            doing="stop",
            timeout_s=self._fleet.config.engine_progress_timeout_s,
            limit="rollout.engine_progress_timeout_s",
        )
        for index, (_, report) in answers.items():
            self._fleet.slots[index].take(report, ask_again=False)
        return [stopped for stopped, _ in answers.values()]

    def _forget(self, key: int) -> GroupRequest:
        """The request of a group that is not in flight any more."""
        self._finished.pop(key, None)
        request, _ = self._in_flight.pop(key)
        self._homeless = [group for group in self._homeless if group.key != key]
        return request


def _stop_report(
    requests: Sequence[GroupRequest],
    complete: Sequence[GroupResponse],
    reports: Sequence[StopReport],
    *,
    keep: bool,
) -> StopReport:
    """What became of groups, of which some had finished and some were lost with their engine."""
    unfinished = [*complete, *(group for report in reports for group in report.unfinished)]
    have = {group.key for group in unfinished}
    unfinished += [_begun(request) for request in requests if request.key not in have]
    before = {request.key: _num_begun(request) for request in requests}
    return StopReport(
        keys=tuple(sorted(before)),
        unfinished=tuple(unfinished) if keep else (),
        num_tokens=sum(report.num_tokens for report in reports)
        + sum(group.num_tokens - before[group.key] for group in complete),
    )


def _begun(request: GroupRequest) -> GroupResponse:
    """What a request had when it was made."""
    nothing = Response(
        token_ids=np.empty(0, dtype=np.int32),
        logprobs=np.empty(0, dtype=np.float32),
        finish_reason="unfinished",
        text="",
        policy_versions=np.empty(0, dtype=np.int32),
    )
    return GroupResponse(
        key=request.key, responses=request.begun or (nothing,) * len(request.seeds)
    )


def _num_begun(request: GroupRequest) -> int:
    return sum(len(response.token_ids) for response in request.begun)
