"""Simulation of every policy under the same assumptions, and its results as a table and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from megadapo.config import RunConfig
from megadapo.errors import ConfigError
from megadapo.lab.record import write_record
from megadapo.lab.simulate.engines import EngineSettings, VirtualEngines
from megadapo.lab.simulate.fit import RunFit
from megadapo.lab.simulate.measures import (
    NUM_WARM_UP,
    SimulatedStep,
    StepMeasures,
    measure,
    standard_error,
)
from megadapo.lab.simulate.policies import Absence, OurSampler, Policy
from megadapo.lab.simulate.task import Task, TaskSettings, read_lengths
from megadapo.observe.tables import TextTable
from megadapo.plan.responses import mean_response, usual_lengths
from megadapo.plan.split import PUBLISH_S, SWITCH_S

MAX_ENGINES = 64
NUM_STEPS = 4
BASELINES = ("rounds-3x", "sync")
"""Names of policies; the time of the first one in a table is the unit of the column `x`."""
CAPTION = """\
seconds: of a step, or until a batch is full; +-: standard error; x: multiples of {}; plan: seconds
by megadapo plan; wait: seconds of a step in which the trainer has nothing to do; idle: engines'
time without work; slots: share in use; gen.: tokens generated per token trained; used: share of
mixed groups' tokens trained on; staleness: mean/largest, in weight publications; bias: of the mean
length; dropped: groups that were too old"""
HEAD = (
    *("mode", "GPUs", "seconds", "+-", "x", "plan", "wait", "idle", "slots", "gen.", "used"),
    *("staleness", "bias", "dropped"),
)


def task_of(
    config: RunConfig,
    fit: RunFit | None = None,
    *,
    lengths: Path | None = None,
    keep_rate: float | None = None,
    solved_share: float | None = None,
) -> TaskSettings:
    """Combine the recipe's sizes, the fit of a run, and the given values; the latter win.

    Raises:
        DataError: `lengths` cannot be read.
    """
    task = TaskSettings(lengths=usual_lengths(mean_response(config))) if fit is None else fit.task
    task = replace(
        task,
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


def engines_of(config: RunConfig, fit: RunFit | None, num_engines: int | None) -> EngineSettings:
    """Return the recipe's engines, with the speed of a run's fit.

    Raises:
        ConfigError: there are too many or too few.
    """
    rollout = config.rollout
    if num_engines is not None and not 1 <= num_engines <= MAX_ENGINES:
        raise ConfigError(f"--engines {num_engines}: must be 1 to {MAX_ENGINES}")
    engines = EngineSettings(
        num_engines=num_engines or rollout.num_engines, num_slots=rollout.max_num_seqs
    )
    return engines if fit is None else replace(engines, speed=fit.engines.speed)


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
    tasks = [Task(replace(task, seed=task.seed + i)) for i in range(num_seeds)]
    return [
        pooled([simulate(policy, one, num_steps=num_steps) for one in tasks]) for policy in policies
    ]


def simulate(
    policy: Policy, task: Task, *, num_steps: int = NUM_STEPS, num_warm_up: int = NUM_WARM_UP
) -> StepMeasures:
    """Run a policy from a cold start."""
    engines = VirtualEngines(policy.engines, task, dispatch=policy.dispatch)
    steps = steps_of(policy, engines, task)
    if policy.absence is not None:
        steps = _with_absence(steps, engines, policy.absence)
    return measure(policy, steps, engines, num_steps=num_steps, num_warm_up=num_warm_up)


def steps_of(policy: Policy, engines: VirtualEngines, task: Task) -> Iterator[SimulatedStep]:
    """Yield steps; if there is a trainer, it works on each batch for `train_s` of the split.

    A mode that does not overlap uses the same GPUs for both, and loses SWITCH_S. With GPUs of their
    own, engines stop for PUBLISH_S to take weights.
    """
    source = policy.start(policy.sampling, engines, task)
    overlaps, split = policy.sampling.overlaps, policy.split
    while True:
        start = engines.now
        groups = source.next_batch()
        waited_s = engines.now - start
        if split is not None and overlaps:
            assert isinstance(source, OurSampler), "the baselines have no trainer"
            trained = engines.now + split.train_s
            source.generate(until=trained)
            waited_s += engines.now - trained
            engines.pass_time(PUBLISH_S)
        elif split is not None:
            engines.pass_time(split.train_s + SWITCH_S, have_gpus=False)
        yield SimulatedStep(
            seconds=engines.now - start,
            waited_s=waited_s,
            # without a trainer the step that would overlap is not simulated
            version=engines.policy_version + (overlaps and split is None),
            groups=groups,
            num_dropped=source.num_dropped,
        )
        source.publish()


def _with_absence(
    steps: Iterator[SimulatedStep], engines: VirtualEngines, absence: Absence
) -> Iterator[SimulatedStep]:
    yield from islice(steps, NUM_WARM_UP + 1)
    engines.plan_absence(absence.num_engines, absence.seconds)
    yield from steps


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
    """Return a table with one row per policy, without the columns that all leave empty."""
    baseline = next(one for one in results if one.name in BASELINES)
    rows = [
        [
            one.name,
            one.gpus,
            f"{one.step_s:,.1f}",
            "" if one.step_error is None else f"{one.step_error / one.step_s:.0%}",
            f"{one.step_s / baseline.step_s:.2f}",
            "" if one.plan_s is None else f"{one.plan_s:,.1f}",
            f"{one.waited_s:,.1f}" if one.gpus else "",
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
    shown = [number for number in range(len(HEAD)) if any(row[number] for row in rows)]
    return TextTable(
        title=title,
        note=CAPTION.format(baseline.name),
        head=[HEAD[number] for number in shown],
        rows=[[row[number] for number in shown] for row in rows],
    ).text()


def fit_table(fit: RunFit) -> str:
    """Return measured and predicted rollout times, one row per step."""
    rows = [
        [str(step), f"{measured:.2f}", f"{predicted:.2f}", f"{predicted / measured:.2f}"]
        for step, measured, predicted in zip(fit.steps, fit.measured, fit.predicted, strict=True)
    ]
    for number, row in enumerate(rows):
        row.append("fitted" if number < fit.num_fitted else "predicted")
    title = (
        f"rollout: speed fitted to {fit.num_fitted} steps, "
        f"{len(fit.steps) - fit.num_fitted} predicted"
    )
    head = ["step", "measured s", "predicted s", "ratio", ""]
    return TextTable(title=title, head=head, rows=rows).text()


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
