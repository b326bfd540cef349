"""How long one step of an engine takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class EngineSpeed:
    """A step gives one token to each running response; its time grows with what runs.

    The defaults are a 32B model in bfloat16 on four H200: 16.4 GB of weights a GPU, read at
    3.4 TB/s, 128 all-reduces and the scheduler make `step_s`; 65.6 GFLOP a token at about half the
    peak make `prefill_s` and most of `response_s`; 64 KiB a token of cache and GPU at 3.4 TB/s make
    `context_s`.
    """

    step_s: float = 15e-3
    """Seconds of a step, whatever runs."""
    response_s: float = 40e-6
    """Seconds more for each running response."""
    context_s: float = 19e-9
    """Seconds more for each token in the key-value cache of running responses."""
    prefill_s: float = 30e-6
    """Seconds for each prompt token, and for each token of a response that is continued."""

    def step_time(self, num_running: int, num_context: float) -> float:
        """Seconds of a step that so many responses, of so many tokens in all, run in."""
        return self.step_s + self.response_s * num_running + self.context_s * num_context

    def time_for(self, num_tokens: float, num_running: int, num_context: float) -> float:
        """Seconds until each running response has got so many tokens more."""
        growth = 0.5 * self.context_s * num_running * num_tokens
        return (self.step_time(num_running, num_context) + growth) * num_tokens

    def tokens_in(self, seconds: float, num_running: int, num_context: float) -> float:
        """Tokens that each running response gets in so many seconds: `time_for` turned around."""
        linear = self.step_time(num_running, num_context)
        square = 0.5 * self.context_s * num_running
        if square == 0.0:
            return seconds / linear
        # the form of the root that stays exact where the square is tiny
        return 2.0 * seconds / (linear + math.sqrt(linear * linear + 4.0 * square * seconds))

    def scaled(self, factor: float) -> EngineSpeed:
        """Return an engine whose every step takes `factor` times as long."""
        return replace(
            self,
            step_s=self.step_s * factor,
            response_s=self.response_s * factor,
            context_s=self.context_s * factor,
            prefill_s=self.prefill_s * factor,
        )
