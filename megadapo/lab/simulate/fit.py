"""Fit of a run's constants, and its rollout times predicted with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megadapo.config import RunConfig, load_config
from megadapo.errors import DataError
from megadapo.lab.simulate.engines import EngineSettings, VirtualEngines
from megadapo.lab.simulate.policies import OurSampler
from megadapo.lab.simulate.task import Task, TaskSettings, run_lengths, step_lengths
from megadapo.observe.metrics.records import MetricRecord
from megadapo.observe.run_records import RunRecords
from megadapo.plan.engine import EngineSpeed
from megadapo.rollout.config import SamplingConfig

RESPONSE_COSTS = (0.0, 0.25, 1.0, 4.0, 16.0, 64.0, 256.0)
"""Factors tried on `EngineSpeed.response_s`, relative to an engine's step."""
MIN_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class RunFit:
    """The engines and the task of a run, and the quality of their fit."""

    engines: EngineSettings
    task: TaskSettings
    """Task of the run as a whole."""
    steps: tuple[int, ...]
    measured: tuple[float, ...]
    """Seconds of each step's rollout."""
    predicted: tuple[float, ...]
    """Seconds of each step's rollout on the virtual clock."""
    num_fitted: int
    """Number of first steps in the fit of the engines' speed; the others are predicted."""


def fit_run(folder: Path) -> RunFit:
    """Fit the engines' speed to the first half of a run, and predict all of its rollout times.

    Lengths and keep rates are each step's own; the sampler is the run's.

    Raises:
        DataError: the folder has no metrics, or too few steps.
    """
    config = load_config(str(folder), [])
    # a resumed step may have all of its groups from the journal, and then engines had no work
    records = [
        record
        for record in RunRecords(folder).steps
        if record["tokens/generated"] and record.get("rollout/engine_tokens_max")
    ]
    if len(records) < MIN_STEPS:
        raise DataError(
            f"{folder}: {len(records)} steps with generated tokens are recorded; the fit of the "
            f"engines' speed needs {MIN_STEPS}"
        )
    measured = [float(record["time/rollout_s"] or 0.0) for record in records]
    half = len(records) // 2
    tasks = [Task(_step_task(config, record)) for record in records]
    engines = EngineSettings(
        num_engines=config.rollout.num_engines,
        num_slots=config.rollout.max_num_seqs,
        speed=_fit_speed(config, records[:half]),
    )
    return RunFit(
        engines=engines,
        task=replace(_step_task(config, _combined(records)), lengths=run_lengths(folder)),
        steps=tuple(int(record["step"] or 0) for record in records),
        measured=tuple(measured),
        predicted=tuple(_predict(config.sampling, engines, tasks)),
        num_fitted=half,
    )


def _fit_speed(config: RunConfig, records: Sequence[MetricRecord]) -> EngineSpeed:
    """Choose the speed whose step times have the ratio nearest to 1 to the run's.

    The fit is in logarithms: twice too slow counts as much as twice too fast, so one delayed step
    has little weight. Similar steps determine the step time but hardly its parts.
    """
    # while busy: the slots' use is over all time
    busy = np.array([_value(one, "rollout/engine_busy_share") for one in records])
    running = np.array([_value(one, "rollout/slot_use") for one in records]) / busy
    running *= config.rollout.max_num_seqs
    context = running * [0.5 * _value(one, "response_length/mean") for one in records]
    token_s = [
        # seconds of busy time per generated token of an engine
        _value(one, "time/rollout_s")
        * _value(one, "rollout/engine_busy_share")
        / (_value(one, "rollout/engine_tokens_min", "rollout/engine_tokens_max") / 2)
        for one in records
    ]
    measured = np.log(token_s) + np.log(running)
    fits = []
    default = EngineSpeed()
    for cost in RESPONSE_COSTS:
        shape = replace(default, response_s=default.response_s * cost)
        times = [shape.step_time(*one) for one in zip(running, context, strict=True)]
        gaps = measured - np.log(times)
        fits.append((float(gaps.var()), cost, shape.scaled(math.exp(gaps.mean()))))
    return min(fits, key=lambda fit: fit[:2])[2]


def _value(record: MetricRecord, *names: str) -> float:
    """Sum metrics of a step."""
    return sum(float(record[name] or 0.0) for name in names)


def _predict(
    sampling: SamplingConfig, engine_settings: EngineSettings, tasks: Sequence[Task]
) -> list[float]:
    """Return the seconds of each step's rollout on the virtual clock."""
    engines = VirtualEngines(engine_settings, tasks[0])
    source = OurSampler(sampling, engines, engines.task)
    seconds = []
    for task in tasks:
        engines.task = task
        start = engines.now
        source.next_batch()
        source.publish()
        seconds.append(engines.now - start)
    return seconds


def _step_task(config: RunConfig, record: MetricRecord) -> TaskSettings:
    """Return the task as one step's metrics describe it."""
    sampled = float(record["groups/sampled"] or 0.0)
    all_correct = float(record["groups/all_correct"] or 0.0) / sampled
    all_incorrect = float(record["groups/all_wrong"] or 0.0) / sampled
    settings = TaskSettings(
        lengths=step_lengths(record),
        solved_share=0.0,
        num_responses=config.sampling.responses_per_prompt,
        max_tokens=config.rollout.max_response_tokens,
        seed=config.run.seed,
    )
    # prompts in between nearly always give mixed groups; they take the remaining share
    keep_rate = min(1.0 - all_correct - all_incorrect, settings.largest_keep_rate)
    settings = replace(settings, keep_rate=max(keep_rate, 1.0 / sampled))
    return replace(settings, solved_share=min(all_correct, 1.0 - settings.between_share))


def _combined(records: Sequence[MetricRecord]) -> MetricRecord:
    """Return one record for all steps: groups are summed, lengths are averaged."""
    totals = ("groups/sampled", "groups/all_correct", "groups/all_wrong")
    means = ("response_length/mean", "response_length/p95")
    values = {
        name: [float(record[name] or 0.0) for record in records] for name in (*totals, *means)
    }
    return {
        **{name: sum(values[name]) for name in totals},
        **{name: float(np.mean(values[name])) for name in means},
    }
