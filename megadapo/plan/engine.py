"""One engine on a virtual clock: all of its running responses advance at the same rate.

The constants of its speed are fitted to published times (`benchmarks/published_times.py`;
docs/clusters.md).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from megadapo.config import RunConfig
from megadapo.models.description import ModelDescription
from megadapo.plan.cards import Card
from megadapo.plan.ranks import engine_bytes
from megadapo.plan.responses import Responses
from megadapo.plan.step_time import forward_flops

READ_SHARE = 0.90
"""Share of a card's memory bandwidth that an engine's step reaches."""
PRODUCT_SHARE = 0.48
"""Share of a card's dense bf16 FLOP/s that the matrix products of an engine's step reach."""
LAYER_S = 105e-6
"""Seconds of a layer's kernel launches, at any load."""
ALL_REDUCE_S = 9e-6
"""Seconds of one of a layer's two all-reduces between the GPUs of an engine."""


@dataclass(frozen=True, kw_only=True)
class EngineSpeed:
    """A model of step times: a step gives one token to each running response."""

    step_s: float
    """Seconds of a step without load."""
    response_s: float
    """Extra seconds for each running response."""
    context_s: float
    """Extra seconds for each token in the KV cache of running responses."""
    prefill_s: float
    """Seconds for each prompt token, and for each token of a response that continues."""
    experts_s: float = 0.0
    """Seconds to read all experts; a step reads those of its running responses."""
    chosen_share: float = 0.0
    """Share of the experts that one token is sent to."""

    def step_time(self, num_running: float, num_context: float) -> float:
        """Return the seconds of one step; `num_context` counts all running responses' tokens."""
        unread: float = (1.0 - self.chosen_share) ** num_running
        experts = self.experts_s * (1.0 - unread)
        return self.step_s + experts + self.response_s * num_running + self.context_s * num_context

    def time_for(self, num_tokens: float, num_running: int, num_context: float) -> float:
        """Return the seconds until each running response has `num_tokens` more."""
        growth = 0.5 * self.context_s * num_running * num_tokens
        return (self.step_time(num_running, num_context) + growth) * num_tokens

    def tokens_in(self, seconds: float, num_running: int, num_context: float) -> float:
        """Return the tokens that each running response gains: the inverse of `time_for`."""
        linear = self.step_time(num_running, num_context)
        square = 0.5 * self.context_s * num_running
        if square == 0.0:
            return seconds / linear
        # this form of the root stays exact for a tiny square
        return 2.0 * seconds / (linear + math.sqrt(linear * linear + 4.0 * square * seconds))


def speed_of(
    config: RunConfig, model: ModelDescription, card: Card, responses: Responses
) -> EngineSpeed:
    """Return the speed of the recipe's engines on a card."""
    rollout, shape = config.rollout, model.shape
    engine = engine_bytes(config, model, card)
    read = READ_SHARE * card.memory_bandwidth
    # each token passes through the stages of an engine in sequence
    weights_s = rollout.pipeline_parallel * engine.weights / read
    chosen = 0.0 if model.routing is None else model.routing.experts_per_token / shape.num_experts
    experts_s = _expert_share(model) * weights_s
    reduces = 2 if rollout.tensor_parallel > 1 else 0
    flops = forward_flops(model, responses.token_sequence) / rollout.ranks_per_engine
    token_s = flops / (PRODUCT_SHARE * card.flops)
    return EngineSpeed(
        step_s=weights_s - experts_s + shape.num_layers * (LAYER_S + reduces * ALL_REDUCE_S),
        response_s=token_s,
        context_s=engine.token / read,
        prefill_s=token_s,
        experts_s=experts_s,
        chosen_share=chosen,
    )


def _expert_share(model: ModelDescription) -> float:
    """Return the share of a model's parameters that is in experts."""
    shape = model.shape
    experts = shape.num_layers * shape.num_experts * 3 * shape.hidden_size * shape.expert_ffn_size
    attention = 2 * shape.hidden_size * shape.head_dim * (shape.num_heads + shape.num_kv_heads)
    ends = (1 if shape.tied else 2) * shape.hidden_size * shape.vocab_size
    return experts / (experts + shape.num_layers * attention + ends)


@dataclass(eq=False, slots=True)
class VirtualResponse:
    """A response in flight."""

    key: int
    """Key of its group."""
    index: int
    """Position in its group."""
    priority: int
    num_prompt: int
    """Prompt tokens that it keeps in the cache."""
    num_tokens: int
    """Length of the complete response."""
    num_done: int = 0
    num_cached: int = 0
    """Prompt tokens that another response of the group has put into the cache."""

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sort key: lower ones run first."""
        return self.priority, self.key, self.index


@dataclass(kw_only=True)
class EngineCounters:
    """Counters of an engine since its start."""

    num_tokens: float = 0.0
    """Number of generated tokens."""
    busy_seconds: float = 0.0
    running_seconds: float = 0.0
    """Integral of running responses over time."""
    max_waiting: int = 0


Running = tuple[float, tuple[int, int, int], float, VirtualResponse]
"""Progress at the response's end, rank, progress at its token 0, and the response."""


class VirtualEngine:
    """An engine that runs up to `num_slots` responses; the others wait by rank.

    `progress` counts steps: a response that starts at progress p with n tokens left ends at p + n.
    So between two events only four numbers change, for any number of running responses.
    """

    def __init__(self, speed: EngineSpeed, *, num_slots: int) -> None:
        self.load = 0
        """Responses that run or wait."""
        self.counters = EngineCounters()
        self._speed = speed
        self._num_slots = num_slots
        self._now = 0.0
        self._progress = 0.0
        self._context = 0.0
        self._running: list[Running] = []
        self._waiting: list[tuple[tuple[int, int, int], VirtualResponse]] = []

    def add(self, responses: Collection[VirtualResponse]) -> None:
        """Queue responses; call `advance` to the present first."""
        for response in responses:
            heapq.heappush(self._waiting, (response.rank, response))
        self.load += len(responses)
        self._fill()
        self.counters.max_waiting = max(self.counters.max_waiting, len(self._waiting))

    def next_event(self) -> float:
        """Return the time at which a response ends; inf if idle."""
        if not self._running:
            return math.inf
        steps = max(0.0, self._running[0][0] - self._progress)
        return self._now + self._speed.time_for(steps, len(self._running), self._context)

    def advance(self, now: float) -> None:
        """Let time pass without an event."""
        if now <= self._now:
            return  # it is busy with prompts until then
        if self._running:
            seconds = now - self._now
            self._step(self._speed.tokens_in(seconds, len(self._running), self._context), seconds)
        self._now = now

    def run_event(self, now: float) -> list[VirtualResponse]:
        """Advance to `now`, the time from `next_event`, and return the responses that end."""
        ends = self._running[0][0]
        self._step(max(0.0, ends - self._progress), now - self._now)
        self._now, self._progress = now, ends
        done: list[VirtualResponse] = []
        while self._running and self._running[0][0] <= ends:
            response = heapq.heappop(self._running)[3]
            self._context -= response.num_prompt + response.num_tokens
            response.num_done = response.num_tokens
            done.append(response)
        self.load -= len(done)
        self._fill()
        return done

    def remove(self, matches: Callable[[VirtualResponse], bool]) -> list[VirtualResponse]:
        """Stop the matching responses and return them with their progress."""
        removed = [one for _, one in self._waiting if matches(one)]
        self._waiting = [entry for entry in self._waiting if not matches(entry[1])]
        heapq.heapify(self._waiting)
        kept: list[Running] = []
        for entry in self._running:
            if matches(entry[3]):
                _, _, start, response = entry
                done = self._progress - start
                self._context -= response.num_prompt + done
                response.num_done = min(int(done), response.num_tokens - 1)
                removed.append(response)
            else:
                kept.append(entry)
        heapq.heapify(kept)
        self._running = kept
        self.load -= len(removed)
        self._fill()
        return removed

    def _step(self, steps: float, seconds: float) -> None:
        num_running = len(self._running)
        self._progress += steps
        self._context += steps * num_running
        self.counters.num_tokens += steps * num_running
        self.counters.busy_seconds += seconds
        self.counters.running_seconds += seconds * num_running

    def _fill(self) -> None:
        """Start waiting responses while slots are free."""
        while self._waiting and len(self._running) < self._num_slots:
            response = heapq.heappop(self._waiting)[1]
            num_context = response.num_prompt + response.num_done
            seconds = self._speed.prefill_s * (num_context - response.num_cached)
            self._now += seconds
            self.counters.busy_seconds += seconds
            self._context += num_context
            start = self._progress - response.num_done
            end = start + response.num_tokens
            heapq.heappush(self._running, (end, response.rank, start, response))
