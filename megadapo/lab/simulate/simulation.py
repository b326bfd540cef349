"""Simulation of every policy under the same assumptions: its measures, as a table and JSON.

Measures are seconds, idle engines, ages of tokens and the bias of lengths.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from megadapo.config import RunConfig
from megadapo.data.group import Group
from megadapo.errors import ConfigError
from megadapo.lab.record import write_record
from megadapo.lab.simulate.engines import VirtualEngines
from megadapo.lab.simulate.policies import OurSampler, Policy
from megadapo.lab.simulate.task import TaskSettings, ToyTask, read_lengths
from megadapo.observe.tables import TextTable
from megadapo.plan.responses import mean_response, usual_lengths
from megadapo.plan.split import PUBLISH_S, SWITCH_S

CAPTION = """\
seconds: of a step; +-: standard error; x: multiples of sync; plan: seconds
by megadapo plan; wait: seconds of a step in which the trainer has nothing to do; idle: engines'
time without work; slots: share in use; gen.: tokens generated per token trained; used: share of
mixed groups' tokens trained on; staleness: mean/largest, in weight publications; bias: of the mean
length; dropped: groups that were too old"""
HEAD = (
    *("mode", "GPUs", "seconds", "+-", "x", "plan", "wait", "idle", "slots", "gen.", "used"),
    *("staleness", "bias", "dropped"),
)


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
    groups: Sequence[Group]
    num_dropped: int


@dataclass(frozen=True, kw_only=True)
class StepMeasures:
    """The measured steps of a policy."""

    name: str
    gpus: str
    """Number of the engines' and of the trainer's GPUs."""
    plan_s: float
    """Seconds of a step by `megadapo plan`."""
    step_s: float
    """Mean seconds of a step."""
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


def task_of(
    config: RunConfig,
    *,
    lengths: Path | None = None,
    keep_rate: float | None = None,
    solved_share: float | None = None,
) -> TaskSettings:
    """Combine the recipe's sizes and the given values."""
    task = TaskSettings(
        lengths=usual_lengths(mean_response(config)),
        num_responses=config.sampling.responses_per_prompt,
        max_tokens=config.rollout.max_response_tokens,
        seed=config.run.seed,
    )
    if lengths is not None:
        task = replace(task, lengths=read_lengths(lengths))
    if keep_rate is not None:
        task = replace(task, keep_rate=keep_rate, solved_share=None)
    if solved_share is not None:
        task = replace(task, solved_share=solved_share)
    return task


def compare(
    policies: Sequence[Policy], task: TaskSettings, *, num_steps: int, num_seeds: int = 1
) -> list[StepMeasures]:
    """Run every policy on the same prompts and answers.

    Args:
        num_steps: measured steps of each policy and seed.
        num_seeds: sets of prompts and answers; seeds count up from the task's seed.

    Raises:
        ConfigError: the task is impossible, or a number is below 1.
        SamplingError: a batch cannot be filled.
    """
    if num_steps < 1 or num_seeds < 1:
        raise ConfigError(f"--steps {num_steps} --seeds {num_seeds}: both must be at least 1")
    tasks = [ToyTask(replace(task, seed=task.seed + i)) for i in range(num_seeds)]
    return [
        pooled([simulate(policy, one, num_steps=num_steps) for one in tasks]) for policy in policies
    ]


def simulate(policy: Policy, task: ToyTask, *, num_steps: int) -> StepMeasures:
    """Run a policy from a cold start, and measure all but the first steps."""
    engines = VirtualEngines(policy.engines, task)
    steps = steps_of(policy, engines, task)
    list(islice(steps, NUM_WARM_UP))
    before = engines.totals()
    measured = list(islice(steps, num_steps))
    present, busy, running, num_tokens, mixed_tokens = (engines.totals() - before).tolist()
    seconds = tuple(step.seconds for step in measured)
    ages: Counter[int] = Counter()
    for step in measured:
        for group in step.groups:
            ages += _ages(group, step.version)
    return StepMeasures(
        name=policy.name,
        gpus=policy.split.name,
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


def steps_of(policy: Policy, engines: VirtualEngines, task: ToyTask) -> Iterator[SimulatedStep]:
    """Yield steps; the trainer works on each batch for `train_s` of the split.

    A mode that does not overlap uses the same GPUs for both, and loses SWITCH_S. With GPUs of their
    own, engines stop for PUBLISH_S to take weights.
    """
    source = OurSampler(policy.sampling, engines, task)
    overlaps, split = policy.sampling.overlaps, policy.split
    while True:
        start = engines.now
        groups = source.next_batch()
        waited_s = engines.now - start
        if overlaps:
            trained = engines.now + split.train_s
            source.generate(until=trained)
            waited_s += engines.now - trained
            engines.pass_time(PUBLISH_S)
        else:
            engines.pass_time(split.train_s + SWITCH_S, have_gpus=False)
        yield SimulatedStep(
            seconds=engines.now - start,
            waited_s=waited_s,
            version=engines.policy_version,
            groups=groups,
            num_dropped=source.num_dropped,
        )
        source.publish()


def standard_error(seconds: Sequence[float]) -> float | None:
    """Return the standard error of a mean; None for one number."""
    if len(seconds) < 2:
        return None
    return float(np.std(seconds, ddof=1)) / math.sqrt(len(seconds))


def _length_bias(
    steps: Sequence[SimulatedStep], engines: VirtualEngines, *, is_redrawn: bool
) -> float:
    versions = {
        group.prompt_index: int(group.responses[0].policy_versions[0])
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


def _ages(group: Group, version: int) -> Counter[int]:
    """Count a group's tokens by the publications between them and `version`."""
    ages: Counter[int] = Counter()
    for response in group.responses:
        versions = response.policy_versions
        first, last = int(versions[0]), int(versions[-1])
        if first == last:  # versions never decrease
            ages[version - first] += len(versions)
        else:
            for old, number in zip(*np.unique(versions, return_counts=True), strict=True):
                ages[version - int(old)] += int(number)
    return ages


def pooled(results: Sequence[StepMeasures]) -> StepMeasures:
    """Combine repetitions of one policy with equally many steps."""
    seconds = tuple(one for result in results for one in result.seconds)
    means: dict[str, Any] = {
        name: float(np.mean([getattr(result, name) for result in results]))
        for name, value in vars(results[0]).items()
        if isinstance(value, float)
    }
    means["step_error"] = standard_error(seconds)
    return replace(
        results[0],
        seconds=seconds,
        staleness_max=max(result.staleness_max for result in results),
        num_dropped=sum(result.num_dropped for result in results),
        **means,
    )


def results_table(results: Sequence[StepMeasures], title: str) -> str:
    """Return a table with one row per policy, of which the first is sync."""
    sync_s = results[0].step_s
    rows = [
        [
            one.name,
            one.gpus,
            f"{one.step_s:,.1f}",
            "" if one.step_error is None else f"{one.step_error / one.step_s:.0%}",
            f"{one.step_s / sync_s:.2f}",
            f"{one.plan_s:,.1f}",
            f"{one.waited_s:,.1f}",
            f"{one.engines_idle:.1%}",
            f"{one.slot_use:.0%}",
            f"{one.generated_per_trained:.2f}",
            f"{one.kept_tokens_trained:.0%}",
            f"{one.staleness_mean:.2f}/{one.staleness_max}",
            f"{one.length_bias:+.1%}",
            str(one.num_dropped),
        ]
        for one in results
    ]
    return TextTable(title=title, note=CAPTION, head=HEAD, rows=rows).text()


def write_json(
    results: Sequence[StepMeasures], policies: Sequence[Policy], task: TaskSettings, path: Path
) -> None:
    """Write the task and, under "modes", an object per policy with its engines."""
    document = {
        "task": task.to_json(),
        "modes": [
            {**asdict(one), "engines": asdict(policy.engines)}
            for one, policy in zip(results, policies, strict=True)
        ],
    }
    write_record(path, document)
