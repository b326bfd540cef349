"""One engine on a virtual clock: all of its running responses advance at the same rate."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from megadapo.lab.simulate.speed import EngineSpeed


@dataclass(eq=False, slots=True)
class VirtualResponse:
    """One response under way."""

    key: int
    """Of its group."""
    index: int
    """Among the responses of its group."""
    priority: int
    num_prompt: int
    """Prompt tokens that it keeps in the cache."""
    num_tokens: int
    """Its length when it is complete."""
    num_done: int = 0
    num_cached: int = 0
    """Prompt tokens that another response of the group has put into the cache."""

    rank: tuple[int, int, int] = field(init=False)
    """Lower ones run first."""

    def __post_init__(self) -> None:
        self.rank = (self.priority, self.key, self.index)


WATERMARK = 0.01
"""Share of the cache that is left free when a response starts, so that it is not at once full."""

Running = tuple[float, tuple[int, int, int], float, VirtualResponse]
"""Progress at which it ends, rank, progress at which it stood at token 0, and the response."""


class VirtualEngine:
    """Runs up to `num_slots` responses, the others wait by rank.

    `progress` counts steps: a response that starts at progress p with n tokens left ends at p + n.
    So between two events nothing but four numbers changes, however many responses run.
    """

    def __init__(self, speed: EngineSpeed, *, num_slots: int, kv_tokens: float = math.inf) -> None:
        """`kv_tokens`: room in the key-value cache; where it is short, the last in rank waits."""
        self.load = 0
        """Responses that run or wait."""
        self.num_tokens = 0.0
        """Generated so far."""
        self.busy_seconds = 0.0
        self.running_seconds = 0.0
        """Integral of running responses over time."""
        self.num_preemptions = 0
        self.max_waiting = 0
        self.num_context_max = 0.0
        self._speed = speed
        self._num_slots = num_slots
        self._kv_tokens = kv_tokens
        self._now = 0.0
        self._progress = 0.0
        self._context = 0.0
        self._running: list[Running] = []
        self._waiting: list[tuple[tuple[int, int, int], VirtualResponse]] = []

    def add(self, responses: Collection[VirtualResponse]) -> None:
        """Take responses in; `advance` to the present must come first."""
        for response in responses:
            heapq.heappush(self._waiting, (response.rank, response))
        self.load += len(responses)
        self._fill()
        self.max_waiting = max(self.max_waiting, len(self._waiting))

    def next_event(self) -> float:
        """Time at which a response ends or the cache is full; infinite where nothing runs."""
        if not self._running:
            return math.inf
        steps = self._steps_to_event()
        return self._now + self._speed.time_for(steps, len(self._running), self._context)

    def advance(self, now: float) -> None:
        """Let time pass in which nothing ends."""
        if now <= self._now:
            return  # it is busy with prompts until then
        if self._running:
            seconds = now - self._now
            self._step(self._speed.tokens_in(seconds, len(self._running), self._context), seconds)
        self._now = now

    def run_event(self, now: float) -> list[VirtualResponse]:
        """Go to `now`, which `next_event` said, and return the responses that end there."""
        ends = self._running[0][0]
        self._step(self._steps_to_event(), now - self._now)
        self._now = now
        done: list[VirtualResponse] = []
        if self._progress + 1e-6 < ends:
            self._preempt()
            return done
        self._progress = ends
        while self._running and self._running[0][0] <= ends:
            response = heapq.heappop(self._running)[3]
            self._context -= response.num_prompt + response.num_tokens
            response.num_done = response.num_tokens
            done.append(response)
        self.load -= len(done)
        self._fill()
        return done

    def remove(self, belongs: Callable[[VirtualResponse], bool]) -> list[VirtualResponse]:
        """Stop the responses that belong to what is stopped, and return them as far as they got."""
        removed = [one for _, one in self._waiting if belongs(one)]
        self._waiting = [entry for entry in self._waiting if not belongs(entry[1])]
        heapq.heapify(self._waiting)
        kept: list[Running] = []
        for entry in self._running:
            if belongs(entry[3]):
                self._pause(entry)
                removed.append(entry[3])
            else:
                kept.append(entry)
        heapq.heapify(kept)
        self._running = kept
        self.load -= len(removed)
        self._fill()
        return removed

    def _steps_to_event(self) -> float:
        room = (self._kv_tokens - self._context) / len(self._running)
        return max(0.0, min(self._running[0][0] - self._progress, room))

    def _step(self, steps: float, seconds: float) -> None:
        num_running = len(self._running)
        self._progress += steps
        self._context += steps * num_running
        self.num_tokens += steps * num_running
        self.busy_seconds += seconds
        self.running_seconds += seconds * num_running
        self.num_context_max = max(self.num_context_max, self._context)

    def _fill(self) -> None:
        """Start waiting responses while there are slots and room in the cache."""
        while self._waiting and len(self._running) < self._num_slots:
            response = self._waiting[0][1]
            num_context = response.num_prompt + response.num_done
            if self._running and self._context + num_context > (1.0 - WATERMARK) * self._kv_tokens:
                break
            heapq.heappop(self._waiting)
            seconds = self._speed.prefill_s * (num_context - response.num_cached)
            self._now += seconds
            self.busy_seconds += seconds
            self._context += num_context
            begun = self._progress - response.num_done
            ends = begun + response.num_tokens
            heapq.heappush(self._running, (ends, response.rank, begun, response))

    def _preempt(self) -> None:
        """The cache is full: the running response that is last in rank waits, as vLLM has it."""
        last = max(self._running, key=lambda entry: entry[1])
        self._running.remove(last)
        heapq.heapify(self._running)
        self._pause(last)
        heapq.heappush(self._waiting, (last[1], last[3]))
        self.num_preemptions += 1

    def _pause(self, entry: Running) -> None:
        """Note how far a running response got, and take it out of the cache."""
        _, _, begun, response = entry
        self._context -= response.num_prompt + self._progress - begun
        response.num_done = min(int(self._progress - begun), response.num_tokens - 1)
