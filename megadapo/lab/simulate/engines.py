"""Engines on a virtual clock, with the interface of `rollout.pool.engines.Engines`."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megadapo.data.group import Response
from megadapo.lab.simulate.task import CORRECT, INCORRECT, Draw, ToyTask
from megadapo.plan.engine import EngineCounters, EngineSpeed, VirtualEngine, VirtualResponse
from megadapo.rollout.pool.engines import WAITING_SHARE
from megadapo.rollout.types import EngineActivity, OpenGroup, StopReport


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The engines of a simulation."""

    num_engines: int
    num_slots: int
    """Responses that an engine runs at once."""
    speed: EngineSpeed


@dataclass(eq=False)
class _Group:
    request: OpenGroup
    draw: Draw
    engine: int
    submitted: float
    num_open: int
    num_done: list[int]
    """Tokens of each response."""


class VirtualEngines:
    """Engines that return the task's answers after the time their speed gives."""

    def __init__(self, settings: EngineSettings, task: ToyTask) -> None:
        self.now = 0.0
        """Seconds on the virtual clock."""
        self.policy_version = 0
        self.requested: dict[int, Draw] = {}
        """Latest draws of all submitted groups, by key."""
        self.mixed_tokens = 0
        """Tokens generated for mixed groups, counted when they finish or stop."""
        self.deadline = math.inf
        """Time at which `finished` returns, with or without groups."""
        self._settings = settings
        self._task = task
        self._engines = [
            VirtualEngine(settings.speed, num_slots=settings.num_slots)
            for _ in range(settings.num_engines)
        ]
        self._first: dict[int, tuple[OpenGroup, int]] = {}
        """First request of each group and its policy version, by key."""
        self._groups: dict[int, _Group] = {}
        self._complete: list[_Group] = []
        # (time, engine, number): only the entry with an engine's latest number counts
        self._events: list[tuple[float, int, int]] = []
        self._numbers = [0] * settings.num_engines
        self._seconds_without_gpus = 0.0
        self._reported = [(0.0, EngineCounters())] * settings.num_engines
        """Time and counters of each engine at the last report."""
        self._zeros = np.zeros(task.settings.max_tokens, dtype=np.int32)
        self._logprobs = np.zeros(task.settings.max_tokens, dtype=np.float32)
        self._versions = self._zeros

    @property
    def capacity(self) -> int:
        """Responses to submit so that every engine stays just ahead of its slots."""
        wanted = math.ceil(self._settings.num_slots * (1 + WAITING_SHARE))
        return sum(max(0, wanted - engine.load) for engine in self._engines)

    @property
    def num_slots(self) -> int:
        """Responses that one engine runs at once."""
        return self._settings.num_slots

    @property
    def num_in_flight(self) -> int:
        """Groups submitted and not returned."""
        return len(self._groups) + len(self._complete)

    def totals(self) -> np.ndarray:
        """Return the engines' seconds: present with their GPUs, busy, and of all responses; their
        tokens, and those of mixed groups, [5]."""
        for engine in self._engines:
            engine.advance(self.now)
        names = ("busy_seconds", "running_seconds", "num_tokens")
        sums = [sum(getattr(engine.counters, name) for engine in self._engines) for name in names]
        present = (self.now - self._seconds_without_gpus) * self._settings.num_engines
        return np.array([present, *sums, self.mixed_tokens])

    def publish(self) -> None:
        """Give the engines new weights."""
        self.policy_version += 1
        self._versions = np.full_like(self._zeros, self.policy_version)

    def draw(self, key: int, policy_version: int) -> Draw:
        """Return the responses that these weights give to a group that was submitted."""
        request, first = self._first[key]
        return self._task.draw(request.prompt_ids, request.seeds, age=policy_version - first)

    def submit(self, groups: Sequence[OpenGroup]) -> None:
        """Start to generate groups."""
        shares: dict[int, list[VirtualResponse]] = {}
        loads = [engine.load for engine in self._engines]
        for request in groups:
            index = loads.index(min(loads))
            group, sequences = self._start(request, index)
            loads[index] += len(sequences)
            if sequences:
                self._groups[request.key] = group
            else:
                self._complete.append(group)
            shares.setdefault(index, []).extend(sequences)
        for index, share in shares.items():
            self._engines[index].advance(self.now)
            self._engines[index].add(share)
            self._schedule(index)

    def finished(self, timeout_s: float | None = None) -> list[OpenGroup]:
        """Let time pass until a group finishes; return [] if none does in time or is in flight."""
        deadline = self.deadline if timeout_s is None else min(self.deadline, self.now + timeout_s)
        while not self._complete and self._events:
            time, index, number = self._events[0]
            if time > deadline:
                break
            heapq.heappop(self._events)
            if number == self._numbers[index]:
                self.now = max(self.now, time)
                self._end(self._engines[index].run_event(time))
                self._schedule(index)
        if not self._complete and deadline < math.inf:
            self.now = deadline
        groups, self._complete = self._complete, []
        return [self._response(group) for group in groups]

    def pass_time(self, seconds: float, *, have_gpus: bool = True) -> None:
        """Let time pass while nothing is in flight."""
        self.now += seconds
        if not have_gpus:
            self._seconds_without_gpus += seconds

    def stop(self, keys: Collection[int] | None = None, *, keep: bool) -> StopReport:
        """Stop groups in flight, all of them for None."""
        chosen = {**self._groups, **{group.request.key: group for group in self._complete}}
        if keys is not None:
            chosen = {key: chosen[key] for key in keys if key in chosen}
        self._remove(chosen)
        groups = [chosen[key] for key in sorted(chosen)]
        for key in chosen:
            self._groups.pop(key, None)
        self._complete = [one for one in self._complete if one.request.key not in chosen]
        responses = [self._response(group) for group in groups]
        return StopReport(
            keys=tuple(sorted(chosen)),
            unfinished=tuple(responses) if keep else (),
            num_tokens=sum(map(_num_new_tokens, groups)),
        )

    def activity(self) -> list[EngineActivity]:
        """Return each engine's activity since the last call."""
        activities = []
        for index, engine in enumerate(self._engines):
            engine.advance(self.now)
            then, before = self._reported[index]
            totals = replace(engine.counters)
            self._reported[index] = (self.now, totals)
            busy = totals.busy_seconds - before.busy_seconds
            running = totals.running_seconds - before.running_seconds
            activities.append(
                EngineActivity(
                    num_tokens=round(totals.num_tokens - before.num_tokens),
                    seconds=self.now - then,
                    busy_seconds=busy,
                    mean_running=running / busy / self._settings.num_slots if busy else 0.0,
                    max_waiting=totals.max_waiting,
                    # the cache is unlimited
                    num_preemptions=0,
                    max_kv_use=0.0,
                )
            )
        return activities

    def _start(self, request: OpenGroup, index: int) -> tuple[_Group, list[VirtualResponse]]:
        if not request.responses:
            self._first.setdefault(request.key, (request, self.policy_version))
            self.requested[request.key] = self.draw(request.key, self.policy_version)
        draw = self.requested[request.key]
        done = [len(begun.token_ids) for begun in request.responses] or [0] * len(request.seeds)
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
        """Record finished responses, and move complete groups to the results."""
        for sequence in sequences:
            group = self._groups[sequence.key]
            group.num_done[sequence.index] = sequence.num_tokens
            group.num_open -= 1
            if not group.num_open:
                self._complete.append(self._groups.pop(sequence.key))

    def _remove(self, chosen: Mapping[int, _Group]) -> None:
        """Take groups from their engines, with the tokens so far."""
        for index in {group.engine for group in chosen.values()}:
            engine = self._engines[index]
            engine.advance(self.now)
            for sequence in engine.remove(lambda one: one.key in chosen):
                chosen[sequence.key].num_done[sequence.index] = sequence.num_done
            self._schedule(index)

    def _schedule(self, index: int) -> None:
        """Replace the engine's next event."""
        self._numbers[index] += 1
        time = self._engines[index].next_event()
        if time < math.inf:
            heapq.heappush(self._events, (time, index, self._numbers[index]))

    def _response(self, group: _Group) -> OpenGroup:
        """Return a group with the tokens generated so far."""
        if group.draw.is_mixed:
            self.mixed_tokens += _num_new_tokens(group)
        begun = group.request.responses or (None,) * len(group.num_done)
        return replace(
            group.request,
            responses=tuple(
                self._one(group.draw, place, num_done, begun[place])
                for place, num_done in enumerate(group.num_done)
            ),
            seconds=self.now - group.submitted,
        )

    def _one(self, draw: Draw, place: int, num_done: int, begun: Response | None) -> Response:
        if begun is not None and len(begun.token_ids) == num_done:
            return begun
        versions = self._versions[:num_done]
        if begun is not None and len(begun.token_ids):
            old = begun.policy_versions
            versions = np.concatenate([old, versions[len(old) :]])
        is_complete = num_done == draw.lengths[place]
        is_truncated = num_done == self._task.settings.max_tokens
        return Response(
            # the content of tokens is not simulated: all responses share these zeros
            token_ids=self._zeros[:num_done],
            logprobs=self._logprobs[:num_done],
            finish_reason=("length" if is_truncated else "stop") if is_complete else "unfinished",
            text=CORRECT if draw.correct[place] else INCORRECT,
            policy_versions=versions,
        )


def _num_new_tokens(group: _Group) -> int:
    """Count the tokens generated for a group since it was submitted."""
    return sum(group.num_done) - group.request.num_tokens
