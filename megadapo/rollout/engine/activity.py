"""How busy an engine is, counted at every step of vLLM's scheduler."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineActivity:
    """What one engine did in a stretch of time."""

    num_tokens: int
    """Response tokens generated."""
    seconds: float
    """Length of the stretch."""
    busy_seconds: float
    """Part of it in which at least one response was being generated."""
    mean_running: float
    """Responses generated at the same time, as a share of max_num_seqs, while it was busy."""
    max_waiting: int
    """Most responses that waited for their turn."""
    num_preemptions: int
    """Responses that gave their place in the key-value cache up and began anew; counted with
    rollout.prefix_caching."""
    max_kv_use: float
    """Largest share of the key-value cache in use."""
    private_bytes: int = 0
    """Main memory that the engine's processes have for themselves, at the end of the stretch; 0
    where nobody looked."""


class ActivityCounter:
    """Adds up the steps of one engine."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._running = 0
        self._last = self._started = time.monotonic()
        self._tokens_before = self._max_waiting = self._num_preemptions = 0
        self._busy_s = self._running_s = self._max_kv_use = 0.0

    def step(self, *, running: int, waiting: int, kv_use: float, num_preemptions: int) -> None:
        """Count a step after which so many responses run and wait.

        Args:
            kv_use: share of the key-value cache in use.
            num_preemptions: responses that it began anew, after they had to give their place up.
        """
        self._pass_time()
        self._running = running
        self._num_preemptions += num_preemptions
        self._max_waiting = max(self._max_waiting, waiting)
        self._max_kv_use = max(self._max_kv_use, kv_use)

    def take(self, num_tokens: int) -> EngineActivity:
        """Return what was counted since the last call, and start over.

        Args:
            num_tokens: response tokens that the engine has generated since it started.
        """
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
        )
        self._started = self._last
        self._tokens_before = num_tokens
        self._max_waiting = self._num_preemptions = 0
        self._busy_s = self._running_s = self._max_kv_use = 0.0
        return activity

    def _pass_time(self) -> None:
        now = time.monotonic()
        if self._running:
            self._busy_s += now - self._last
            self._running_s += self._running * (now - self._last)
        self._last = now
