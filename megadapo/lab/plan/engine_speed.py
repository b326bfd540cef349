"""Speed of an engine: the seconds of its steps, and the responses that it runs at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megadapo.config import RunConfig
from megadapo.lab.plan.cards import Card
from megadapo.lab.plan.phases import itemsize_of
from megadapo.lab.plan.ranks import engine_bytes
from megadapo.lab.plan.step_time import (
    PROMPT_TOKENS,
    READ_SHARE,
    forward_flops,
    mean_context,
    mean_response,
)
from megadapo.models.description import ModelDescription

PRODUCT_SHARE = 0.50
"""Share of a card's dense bf16 FLOP/s that the matrix products of an engine's step reach."""
ALL_REDUCE_S = 40e-6
"""Seconds of one of a layer's two all-reduces, with the launch of its kernels."""
SCHEDULER_S = 5e-3
"""Seconds of a step outside the GPUs' kernels."""
SQUARED_LENGTH = 1.5
"""Mean squared length of responses over their squared mean. A long response is in the cache for
longer, so running responses have the mean context of this many mean responses."""


@dataclass(frozen=True, kw_only=True)
class EngineSpeed:
    """A model of step times: a step gives one token to each running response.

    The defaults are a 32B model in bfloat16 on four H200: 16.4 GB of weights a GPU, read at
    3.4 TB/s, 128 all-reduces and the scheduler make `step_s`. 65.6 GFLOP a token at about half the
    peak make `prefill_s` and most of `response_s`. 64 KiB of cache a token and GPU at 3.4 TB/s make
    `context_s`. `speed_of` has the same numbers for any model and card.
    """

    step_s: float = 15e-3
    """Seconds of a step without load."""
    response_s: float = 40e-6
    """Extra seconds for each running response."""
    context_s: float = 19e-9
    """Extra seconds for each token in the KV cache of running responses."""
    prefill_s: float = 30e-6
    """Seconds for each prompt token, and for each token of a response that continues."""

    def step_time(self, num_running: int, num_context: float) -> float:
        """Return the seconds of one step; `num_context` counts all running responses' tokens."""
        return self.step_s + self.response_s * num_running + self.context_s * num_context

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

    def scaled(self, factor: float) -> EngineSpeed:
        """Return an engine whose every step takes `factor` times as long."""
        return replace(
            self,
            step_s=self.step_s * factor,
            response_s=self.response_s * factor,
            context_s=self.context_s * factor,
            prefill_s=self.prefill_s * factor,
        )


def speed_of(config: RunConfig, model: ModelDescription, card: Card) -> EngineSpeed:
    """Return the speed of the recipe's engines on a card."""
    rollout = config.rollout
    engine = engine_bytes(model, rollout, card, itemsize=itemsize_of(config))
    read = READ_SHARE * card.memory_bandwidth
    stages = rollout.pipeline_parallel
    reduces = 2 * model.shape.num_layers if rollout.tensor_parallel > 1 else 0
    flops = forward_flops(model, mean_response(config)) / rollout.ranks_per_engine
    token_s = flops / (PRODUCT_SHARE * card.flops)
    return EngineSpeed(
        # each token passes through the stages of an engine in sequence
        step_s=stages * engine.weights / read + reduces * ALL_REDUCE_S + SCHEDULER_S,
        response_s=token_s,
        context_s=engine.token / read,
        prefill_s=token_s,
    )


def slots_of(config: RunConfig, model: ModelDescription, card: Card) -> int:
    """Return the responses that an engine runs at once, in its slots and in its cache."""
    engine = engine_bytes(model, config.rollout, card, itemsize=itemsize_of(config))
    num_cached = engine.cache_tokens / running_context(config)
    return max(1, min(config.rollout.max_num_seqs, int(num_cached)))


def running_context(config: RunConfig) -> float:
    """Return the mean tokens in the cache of one running response."""
    return PROMPT_TOKENS + SQUARED_LENGTH * (mean_context(config) - PROMPT_TOKENS)
