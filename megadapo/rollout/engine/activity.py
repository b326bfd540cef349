"""The load of an engine, counted at every step of vLLM's scheduler."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineActivity:
    """Activity of one engine in an interval."""

    num_tokens: int = 0
    """Number of generated response tokens."""
    seconds: float = 0.0
    """Length of the interval."""
    busy_seconds: float = 0.0
    """Time in which at least one response was running."""
    mean_running: float = 0.0
    """Mean number of running responses while busy, as a share of max_num_seqs."""
    max_waiting: int = 0
    """Largest number of waiting responses."""
    num_preemptions: int = 0
    """Number of responses that lost their key-value cache and were computed again; counted only
    with prefix caching."""
    max_kv_use: float = 0.0
    """Largest share of the key-value cache in use."""
    num_prompt_tokens: int = 0
    """Number of tokens at which requests began: prompts, with the earlier turns of episodes."""
    num_cached_tokens: int = 0
    """Number of these that were in the prefix cache."""
    private_bytes: int = 0
    """Private memory of the engine's processes at the end of the interval; 0: not measured."""


class ActivityCounter:
    """A counter of one engine's steps."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._running = 0
        self._last = self._started = time.monotonic()
        self._tokens_before = self._max_waiting = self._num_preemptions = 0
        self._num_prompt_tokens = self._num_cached_tokens = 0
        self._busy_s = self._running_s = self._max_kv_use = 0.0

    def step(
        self,
        *,
        running: int,
        waiting: int,
        kv_use: float,
        num_preemptions: int,
        num_prompt_tokens: int = 0,
        num_cached_tokens: int = 0,
    ) -> None:
        """Count a step, with the responses that run and wait after it."""
        self._pass_time()
        self._running = running
        self._num_preemptions += num_preemptions
        self._num_prompt_tokens += num_prompt_tokens
        self._num_cached_tokens += num_cached_tokens
        self._max_waiting = max(self._max_waiting, waiting)
        self._max_kv_use = max(self._max_kv_use, kv_use)

    def take(self, num_tokens: int) -> EngineActivity:
        """Return the activity since the last call; `num_tokens` counts since the engine started."""
        self._pass_time()
        activity = EngineActivity(
            num_tokens=num_tokens - self._tokens_before,
            seconds=self._last - self._started,
            busy_seconds=self._busy_s,
            mean_running=(
                self._running_s / (self._busy_s * self._max_num_seqs) if self._busy_s else 0.0
            ),
            max_waiting=self._max_waiting,
            num_preemptions=self._num_preemptions,
            max_kv_use=self._max_kv_use,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
        )
        self._started = self._last
        self._tokens_before = num_tokens
        self._max_waiting = self._num_preemptions = 0
        self._num_prompt_tokens = self._num_cached_tokens = 0
        self._busy_s = self._running_s = self._max_kv_use = 0.0
        return activity

    def _pass_time(self) -> None:
        now = time.monotonic()
        if self._running:
            self._busy_s += now - self._last
            self._running_s += self._running * (now - self._last)
        self._last = now
