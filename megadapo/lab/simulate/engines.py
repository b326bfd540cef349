"""Engines on a virtual clock, as the sampler sees `rollout.engines.Engines`."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megadapo.lab.simulate.engine import VirtualEngine, VirtualResponse
from megadapo.lab.simulate.speed import EngineSpeed
from megadapo.lab.simulate.task import RIGHT, WRONG, Draw, Task
from megadapo.rollout.engine.activity import EngineActivity
from megadapo.rollout.pool.fleet import AHEAD
from megadapo.rollout.types import (
    GroupRequest,
    GroupResponse,
    Response,
    StopReport,
)

Dealing = Literal["least_loaded", "in_turn"]
"""To the engine with the fewest responses; or to one after the other, all at once."""

UNLIMITED = 1 << 40
"""Room of engines that are given everything at once."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The engines of a simulation."""

    num_engines: int
    num_slots: int = 256
    """Responses that an engine runs at once."""
    speed: EngineSpeed = EngineSpeed()
    kv_tokens: float = math.inf
    """Tokens that an engine's key-value cache holds."""


@dataclass(eq=False)
class _Group:
    request: GroupRequest
    draw: Draw
    engine: int
    submitted: float
    num_open: int
    num_done: list[int]
    """Tokens of each response."""


class VirtualEngines:
    """Answers as the task has it, when the engines' speed has it."""

    def __init__(
        self, settings: EngineSettings, task: Task, *, dealing: Dealing = "least_loaded"
    ) -> None:
        self.now = 0.0
        """Seconds on the virtual clock."""
        self.policy_version = 0
        self.asked: dict[int, Draw] = {}
        """Every group that was ever submitted, by key."""
        self.signal_tokens = 0
        """Tokens generated for groups with a signal, counted when they finish or stop."""
        self.task = task
        """What is answered to those that are submitted; another may take its place."""
        self._settings = settings
        self._dealing = dealing
        self._engines = [
            VirtualEngine(
                settings.speed, num_slots=settings.num_slots, kv_tokens=settings.kv_tokens
            )
            for _ in range(settings.num_engines)
        ]
        self._groups: dict[int, _Group] = {}
        self._complete: list[_Group] = []
        self._num_dealt = 0
        # (time, engine, number): of an engine's entries only the one with its latest number counts
        self._events: list[tuple[float, int, int]] = []
        self._numbers = [0] * settings.num_engines
        self._seen = [_Totals()] * settings.num_engines
        self._zeros = np.zeros(task.settings.max_tokens, dtype=np.int32)
        self._logprobs = np.zeros(task.settings.max_tokens, dtype=np.float32)
        self._versions = self._zeros

    @property
    def room(self) -> int:
        """Responses that may be submitted so that every engine stays just ahead of its slots."""
        if self._dealing == "in_turn":
            return UNLIMITED
        wanted = math.ceil(self._settings.num_slots * (1 + AHEAD))
        return sum(max(0, wanted - engine.load) for engine in self._engines)

    @property
    def num_in_flight(self) -> int:
        """Groups submitted and not handed back."""
        return len(self._groups) + len(self._complete)

    @property
    def num_tokens(self) -> float:
        """Generated so far by all engines."""
        return sum(engine.num_tokens for engine in self._engines)

    @property
    def running_seconds(self) -> float:
        """Integral of all running responses over time."""
        return sum(engine.running_seconds for engine in self._engines)

    def publish(self) -> None:
        """Give the engines new weights."""
        self.policy_version += 1
        self._versions = np.full_like(self._zeros, self.policy_version)

    def submit(self, groups: Sequence[GroupRequest]) -> None:
        """Begin to generate groups."""
        shares: dict[int, list[VirtualResponse]] = {}
        loads = [engine.load for engine in self._engines]
        for request in groups:
            index = self._next_engine(loads)
            group, sequences = self._begin(request, index)
            loads[index] += len(sequences)
            if sequences:
                self._groups[request.key] = group
            else:
                self._complete.append(group)
            shares.setdefault(index, []).extend(sequences)
        for index, share in shares.items():
            self._engines[index].advance(self.now)
            self._engines[index].add(share)
            self._expect(index)

    def finished(self, timeout_s: float | None = None) -> list[GroupResponse]:
        """Let time pass until a group has finished; [] at the timeout, or with none in flight."""
        deadline = math.inf if timeout_s is None else self.now + timeout_s
        while not self._complete and self._events:
            time, index, number = self._events[0]
            if time > deadline:
                break
            heapq.heappop(self._events)
            if number == self._numbers[index]:
                self.now = max(self.now, time)
                self._end(self._engines[index].run_event(time))
                self._expect(index)
        if not self._complete and deadline < math.inf:
            self.now = deadline
        groups, self._complete = self._complete, []
        return [self._response(group) for group in groups]

    def stop(self, keys: Collection[int] | None = None, *, keep: bool) -> StopReport:
        """End groups that are in flight, all of them for None."""
        chosen = self._chosen(keys)
        for index in {group.engine for group in chosen.values()}:
            engine = self._engines[index]
            engine.advance(self.now)
            for sequence in engine.remove(lambda one: one.key in chosen):
                chosen[sequence.key].num_done[sequence.index] = sequence.num_done
            self._expect(index)
        groups = [chosen[key] for key in sorted(chosen)]
        for key in chosen:
            self._groups.pop(key, None)
        self._complete = [one for one in self._complete if one.request.key not in chosen]
        num_tokens = [_num_new_tokens(group) for group in groups]
        responses = [self._response(group) for group in groups]
        return StopReport(
            keys=tuple(sorted(chosen)),
            unfinished=tuple(responses) if keep else (),
            num_tokens=sum(num_tokens),
        )

    def activity(self) -> list[EngineActivity]:
        """What each engine did since this was last asked."""
        for engine in self._engines:
            engine.advance(self.now)
        totals = [_Totals.of(engine, self.now) for engine in self._engines]
        seen, self._seen = self._seen, totals
        return [
            total.since(before, self._settings) for total, before in zip(totals, seen, strict=True)
        ]

    def _next_engine(self, loads: Sequence[int]) -> int:
        if self._dealing == "in_turn":
            self._num_dealt += 1
            return (self._num_dealt - 1) % len(loads)
        return loads.index(min(loads))

    def _begin(self, request: GroupRequest, index: int) -> tuple[_Group, list[VirtualResponse]]:
        if not request.begun:
            self.asked[request.key] = self.task.draw(request.prompt_ids, request.seeds)
        draw = self.asked[request.key]
        done = [len(begun.token_ids) for begun in request.begun] or [0] * len(request.seeds)
        sequences = [
            VirtualResponse(
                key=request.key,
                index=place,
                priority=request.priority,
                num_prompt=len(request.prompt_ids),
                num_tokens=num_tokens,
                num_done=done[place],
            )
            for place, num_tokens in enumerate(draw.lengths.tolist())
            if done[place] < num_tokens
        ]
        for sequence in sequences[1:]:
            sequence.num_cached = sequence.num_prompt
        group = _Group(request, draw, index, self.now, len(sequences), done)
        return group, sequences

    def _end(self, sequences: Iterable[VirtualResponse]) -> None:
        """Note responses that have ended, and the groups that are complete with them."""
        for sequence in sequences:
            group = self._groups[sequence.key]
            group.num_done[sequence.index] = sequence.num_tokens
            group.num_open -= 1
            if not group.num_open:
                self._complete.append(self._groups.pop(sequence.key))

    def _expect(self, index: int) -> None:
        """Replace the engine's next event."""
        self._numbers[index] += 1
        time = self._engines[index].next_event()
        if time < math.inf:
            heapq.heappush(self._events, (time, index, self._numbers[index]))

    def _chosen(self, keys: Collection[int] | None) -> dict[int, _Group]:
        groups = {**self._groups, **{group.request.key: group for group in self._complete}}
        if keys is None:
            return groups
        return {key: groups[key] for key in keys if key in groups}

    def _response(self, group: _Group) -> GroupResponse:
        """What there is of a group's responses."""
        if group.draw.is_mixed:
            self.signal_tokens += _num_new_tokens(group)
        begun = group.request.begun or (None,) * len(group.num_done)
        return GroupResponse(
            key=group.request.key,
            responses=tuple(
                self._one(group.draw, place, num_done, begun[place])
                for place, num_done in enumerate(group.num_done)
            ),
            engine=group.engine,
            seconds=self.now - group.submitted,
        )

    def _one(self, draw: Draw, place: int, num_done: int, begun: Response | None) -> Response:
        if begun is not None and len(begun.token_ids) == num_done:
            return begun
        versions = self._versions[:num_done]
        if begun is not None and len(begun.token_ids):
            old = begun.policy_versions
            versions = np.concatenate([old, versions[len(old) :]])
        complete = num_done == draw.lengths[place]
        cut = num_done == self.task.settings.max_tokens
        return Response(
            # of zeros that all responses share: what tokens say is not simulated
            token_ids=self._zeros[:num_done],
            logprobs=self._logprobs[:num_done],
            finish_reason=("length" if cut else "stop") if complete else "unfinished",
            text=RIGHT if draw.correct[place] else WRONG,
            policy_versions=versions,
        )


@dataclass(frozen=True)
class _Totals:
    """What an engine has done since it started."""

    now: float = 0.0
    num_tokens: float = 0.0
    busy_seconds: float = 0.0
    running_seconds: float = 0.0
    num_preemptions: int = 0
    max_waiting: int = 0
    num_context_max: float = 0.0

    @classmethod
    def of(cls, engine: VirtualEngine, now: float) -> _Totals:
        return cls(
            now=now,
            num_tokens=engine.num_tokens,
            busy_seconds=engine.busy_seconds,
            running_seconds=engine.running_seconds,
            num_preemptions=engine.num_preemptions,
            max_waiting=engine.max_waiting,
            num_context_max=engine.num_context_max,
        )

    def since(self, before: _Totals, settings: EngineSettings) -> EngineActivity:
        busy = self.busy_seconds - before.busy_seconds
        running = self.running_seconds - before.running_seconds
        return EngineActivity(
            num_tokens=round(self.num_tokens - before.num_tokens),
            seconds=self.now - before.now,
            busy_seconds=busy,
            mean_running=running / busy / settings.num_slots if busy else 0.0,
            max_waiting=self.max_waiting,
            num_preemptions=self.num_preemptions - before.num_preemptions,
            max_kv_use=self.num_context_max / settings.kv_tokens,
        )


def _num_new_tokens(group: _Group) -> int:
    """Tokens generated for a group since it was submitted."""
    return sum(group.num_done) - sum(len(begun.token_ids) for begun in group.request.begun)
