"""Seconds of a step before it runs, on GPUs or on this machine's cores."""

from __future__ import annotations

import math

from megadapo.cluster.machine import usable_cores
from megadapo.cluster.this_node import has_gpu
from megadapo.config import RunConfig
from megadapo.errors import DataError
from megadapo.models.description import ModelDescription
from megadapo.plan.cards import Card
from megadapo.plan.phases import models_of
from megadapo.plan.responses import Responses
from megadapo.plan.split import StepModel
from megadapo.plan.step_time import train_seconds

CORE_FLOPS, CORE_BANDWIDTH = 100e9, 10e9
"""FLOP/s in fp32 and bytes per second of a core, low numbers: docs/notes/step-time-on-cpu.md
measures 117e9 with AVX2 and 265e9 with AVX-512, and 41e9 of two cores."""
TRAINER_FACTOR = 2.0
"""Share of the FLOP/s that a trainer reaches on cores, over that on GPUs; the note has 81 %."""
CPU_STEP_S = 0.5
"""Seconds of a step on cores besides rollout and training."""
LONG_STEP_S = 1800.0
"""Seconds of a step above which a recipe gets a warning; 32B on 128 GPUs takes 1,234."""


def step_seconds(
    config: RunConfig, model: ModelDescription, card: Card | None, responses: Responses
) -> tuple[float, float]:
    """Return the seconds of a step's rollout and of the whole step.

    `card`: the kind of the GPUs; None stands for this machine's cores.
    """
    steps = StepModel(config, model, card or _cores(config.rollout.num_threads), responses)
    split = steps.own_split()
    rollout_s = steps.rollout_seconds(split, config.sampling)
    if card is not None:
        return rollout_s, steps.step_seconds(split, config.sampling)
    cores = _cores(TRAINER_FACTOR * usable_cores() / config.trainer.num_ranks)
    return rollout_s, rollout_s + train_seconds(config, model, cores, responses) + CPU_STEP_S


def _cores(number: float) -> Card:
    """Return cores as a card; its memory is no limit."""
    return Card(
        name="cores",
        device="",
        memory_bytes=1 << 50,
        flops=number * CORE_FLOPS,
        memory_bandwidth=number * CORE_BANDWIDTH,
        link_bandwidth=math.inf,
    )


def core_warnings(config: RunConfig) -> list[str]:
    """Warn of a recipe that this machine's cores take very long for, or compute in bf16."""
    device = config.cluster.device
    if device == "cuda" or (device == "auto" and has_gpu()) or config.cluster.address is not None:
        return []
    warnings, sampling = [], config.sampling
    if config.model.dtype == "bfloat16":
        warnings.append(
            'model.dtype = "bfloat16" on a CPU: cores without bf16 instructions emulate it, and '
            'trainer and engine round log-probs differently; set it to "float32"'
        )
    try:
        model = models_of(config).policy
    except DataError:
        return warnings  # the model is not here
    _, seconds = step_seconds(config, model, None, Responses.of(config))
    if seconds > LONG_STEP_S:
        warnings.append(
            f"a step takes about {seconds / 3600:,.1f} hours on {usable_cores()} cores, the run "
            f"{config.run.num_steps * seconds / 3600:,.0f}: sampling.prompts_per_step = "
            f"{sampling.prompts_per_step} x sampling.responses_per_prompt = "
            f"{sampling.responses_per_prompt} responses, of up to rollout.max_response_tokens = "
            f"{config.rollout.max_response_tokens}. Lower these keys, or let megadapo new MODEL "
            "DATA write a recipe for this machine"
        )
    return warnings
