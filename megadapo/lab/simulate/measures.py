"""Measures of simulated steps: seconds, idle engines, ages of tokens, the bias of lengths."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from megadapo.lab.simulate.engines import VirtualEngines
from megadapo.lab.simulate.policies import Policy, TrainedGroup

NUM_WARM_UP = 4
"""Steps before the measured ones: the first has no leftovers from a step before it."""


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """A batch and the time around it."""

    seconds: float
    """From the end of the step before to the end of this one."""
    waited_s: float
    """Seconds in which the trainer had nothing to do."""
    version: int
    """Version of the weights that train on the batch."""
    groups: Sequence[TrainedGroup]
    num_dropped: int


@dataclass(frozen=True, kw_only=True)
class StepMeasures:
    """The measured steps of a policy."""

    name: str
    gpus: str
    """Number of the engines' and of the trainer's GPUs; empty without a trainer."""
    plan_s: float | None
    """Seconds of a step by `megadapo plan`; None without a trainer."""
    step_s: float
    """Mean seconds of a step, or until a batch is full if there is no trainer."""
    step_error: float | None
    """Standard error of that mean; None for one step."""
    seconds: tuple[float, ...]
    """Time of each step."""
    waited_s: float
    """Mean seconds of a step in which the trainer has nothing to do."""
    engines_idle: float
    """Share of the time in which engines have GPUs but no work."""
    slot_use: float
    """Mean share of `rollout.max_num_seqs` in use, in that time."""
    generated_per_trained: float
    """Tokens generated for each token trained on."""
    kept_tokens_trained: float
    """Share trained on, of the tokens generated for mixed groups; 1 without any."""
    staleness_mean: float
    """Publications between sampling a token and training on it."""
    staleness_max: int
    length_bias: float
    """Mean response length of the trained groups over all mixed groups requested between the first
    and the last of them (finished or not), minus 1. A group from the reserve is compared with new
    responses, as the unfinished groups of its step have."""
    num_dropped: int
    """Mixed groups that were too old for a batch."""


def measure(
    policy: Policy,
    steps: Iterator[SimulatedStep],
    engines: VirtualEngines,
    *,
    num_steps: int,
    num_warm_up: int,
) -> StepMeasures:
    """Simulate steps from a cold start, and measure all but the first ones."""
    list(islice(steps, num_warm_up))
    before = _counters(engines)
    measured = list(islice(steps, num_steps))
    present, busy, running, num_tokens, mixed_tokens = (_counters(engines) - before).tolist()
    seconds = tuple(step.seconds for step in measured)
    ages: Counter[int] = Counter()
    for step in measured:
        for group in step.groups:
            ages += _ages(group, step.version)
    return StepMeasures(
        name=policy.name,
        gpus="" if policy.split is None else policy.split.name,
        plan_s=policy.plan_s,
        step_s=float(np.mean(seconds)),
        step_error=standard_error(seconds),
        seconds=seconds,
        waited_s=float(np.mean([step.waited_s for step in measured])),
        engines_idle=max(0.0, 1.0 - busy / present),
        slot_use=running / present / engines.num_slots,
        generated_per_trained=num_tokens / ages.total(),
        kept_tokens_trained=ages.total() / max(ages.total(), mixed_tokens),
        staleness_mean=sum(age * number for age, number in ages.items()) / ages.total(),
        staleness_max=max(ages),
        # a group that misses a batch continues, or draws new responses
        length_bias=_length_bias(measured, engines, is_redrawn=not policy.sampling.carries),
        num_dropped=sum(step.num_dropped for step in measured),
    )


def _counters(engines: VirtualEngines) -> np.ndarray:
    """Return the engines' seconds: present, busy and of all responses; their tokens, and those of
    mixed groups."""
    engines.activity()  # advances every engine to the present
    return np.array(
        [
            engines.engine_seconds,
            engines.busy_seconds,
            engines.running_seconds,
            engines.num_tokens,
            engines.mixed_tokens,
        ]
    )


def standard_error(seconds: Sequence[float]) -> float | None:
    """Return the standard error of a mean; None for one number."""
    if len(seconds) < 2:
        return None
    return float(np.std(seconds, ddof=1)) / math.sqrt(len(seconds))


def _length_bias(
    steps: Sequence[SimulatedStep], engines: VirtualEngines, *, is_redrawn: bool
) -> float:
    versions = {
        group.prompt_index: int(group.policy_versions[0][0])
        for step in steps
        for group in step.groups
    }
    trained = np.mean([engines.requested[index].lengths.mean() for index in versions])
    mixed = np.mean(
        [
            (
                engines.draw(index, versions[index]) if is_redrawn and index in versions else draw
            ).lengths.mean()
            for index, draw in engines.requested.items()
            if min(versions) <= index <= max(versions) and draw.is_mixed
        ]
    )
    return float(trained / mixed) - 1.0


def _ages(group: TrainedGroup, version: int) -> Counter[int]:
    """Count a group's tokens by the publications between them and `version`."""
    ages: Counter[int] = Counter()
    for versions in group.policy_versions:
        first, last = int(versions[0]), int(versions[-1])
        if first == last:  # versions never decrease
            ages[version - first] += len(versions)
        else:
            for old, number in zip(*np.unique(versions, return_counts=True), strict=True):
                ages[version - int(old)] += int(number)
    return ages
