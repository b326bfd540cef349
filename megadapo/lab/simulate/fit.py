"""The constants of a run, and its rollout times predicted with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megadapo.config import RunConfig, load_config
from megadapo.errors import DataError
from megadapo.lab.simulate.engines import EngineSettings, VirtualEngines
from megadapo.lab.simulate.lengths import run_lengths, step_lengths
from megadapo.lab.simulate.policies import OurSampler
from megadapo.lab.simulate.speed import EngineSpeed
from megadapo.lab.simulate.task import Task, TaskSettings
from megadapo.observe.metrics.records import MetricRecord, read_metrics
from megadapo.rollout.config import SamplingConfig

RESPONSE_COSTS = (0.0, 0.25, 1.0, 4.0, 16.0, 64.0, 256.0)
"""How much dearer a running response may be, beside an engine's step, than `EngineSpeed` has it."""
MIN_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class RunFit:
    """What a run says about its engines and its task, and how well it fits."""

    engines: EngineSettings
    task: TaskSettings
    """Of the run as a whole."""
    steps: tuple[int, ...]
    measured: tuple[float, ...]
    """Seconds of each step's rollout."""
    predicted: tuple[float, ...]
    """The same on the virtual clock."""
    num_fitted: int
    """Steps, from the first on, that the engines' speed was fitted to; the others are predicted."""


def fit_run(folder: Path) -> RunFit:
    """Fit the engines' speed to the first half of a run, and predict all of its rollout times.

    Lengths and keep rates are each step's own; the sampler is the run's.

    Raises:
        DataError: the folder has no metrics, or of too few steps.
    """
    config = load_config(str(folder), [])
    records = [record for record in read_metrics(folder) if record["tokens/generated"]]
    if len(records) < MIN_STEPS:
        raise DataError(
            f"{folder}: {len(records)} steps with generated tokens are recorded; it takes "
            f"{MIN_STEPS} to fit the engines' speed"
        )
    measured = [float(record["time/rollout_s"] or 0.0) for record in records]
    half = len(records) // 2
    tasks = [Task(_step_task(config, record)) for record in records]
    speed = _fit_speed(config, records[:half])
    engines = _engines(config, speed)
    return RunFit(
        engines=engines,
        task=replace(_step_task(config, _whole(records)), lengths=run_lengths(folder)),
        steps=tuple(int(record["step"] or 0) for record in records),
        measured=tuple(measured),
        predicted=tuple(_predict(config.sampling, engines, tasks)),
        num_fitted=half,
    )


def _fit_speed(config: RunConfig, records: Sequence[MetricRecord]) -> EngineSpeed:
    """Choose the speed whose engine steps take what the run's took, by their ratio.

    Twice too slow counts as much as twice too fast: a step that something else delayed pulls
    little. Steps that are much alike say how long they take, and little of what it is made of.
    """
    running = np.array([_value(one, "rollout/slot_use") for one in records])
    running *= config.rollout.max_num_seqs
    context = running * [0.5 * _value(one, "response_length/mean") for one in records]
    measured = np.log([_token_s(one) for one in records]) + np.log(running)
    fits = []
    default = EngineSpeed()
    for cost in RESPONSE_COSTS:
        shape = replace(default, response_s=default.response_s * cost)
        times = [shape.step_time(*one) for one in zip(running, context, strict=True)]
        gaps = measured - np.log(times)
        fits.append((float(gaps.var()), cost, shape.scaled(math.exp(gaps.mean()))))
    return min(fits, key=lambda fit: fit[:2])[2]


def _token_s(record: MetricRecord) -> float:
    """Seconds that an engine took for each token it generated, while it was busy."""
    num_tokens = _value(record, "rollout/engine_tokens_min", "rollout/engine_tokens_max") / 2
    seconds = _value(record, "time/rollout_s") * _value(record, "rollout/engine_busy_share")
    return seconds / num_tokens


def _value(record: MetricRecord, *names: str) -> float:
    """Sum of these metrics of a step."""
    return sum(float(record[name] or 0.0) for name in names)


def _predict(
    sampling: SamplingConfig, engine_settings: EngineSettings, tasks: Sequence[Task]
) -> list[float]:
    """Seconds of each step's rollout on the virtual clock."""
    engines = VirtualEngines(engine_settings, tasks[0])
    source = OurSampler(sampling, engines, engines.task)
    seconds = []
    for task in tasks:
        engines.task = task
        start = engines.now
        source.next_batch()
        engines.publish()
        seconds.append(engines.now - start)
    return seconds


def _engines(config: RunConfig, speed: EngineSpeed) -> EngineSettings:
    rollout = config.rollout
    return EngineSettings(
        num_engines=rollout.num_engines, num_slots=rollout.max_num_seqs, speed=speed
    )


def _step_task(config: RunConfig, record: MetricRecord) -> TaskSettings:
    """The task as it was in one step."""
    sampled = float(record["groups/sampled"] or 0.0)
    right = float(record["groups/all_correct"] or 0.0) / sampled
    wrong = float(record["groups/all_wrong"] or 0.0) / sampled
    settings = TaskSettings(
        lengths=step_lengths(record),
        solved_share=0.0,
        num_responses=config.sampling.responses_per_prompt,
        max_tokens=config.rollout.max_response_tokens,
        seed=config.run.seed,
    )
    # what is between has a signal nearly always, and takes what the others leave
    keep_rate = min(1.0 - right - wrong, settings.largest_keep_rate)
    settings = replace(settings, keep_rate=max(keep_rate, 1.0 / sampled))
    return replace(settings, solved_share=min(right, 1.0 - settings.between_share))


def _whole(records: Sequence[MetricRecord]) -> MetricRecord:
    """One record for all steps: groups are added up, lengths are averaged."""

    def values(name: str) -> list[float]:
        return [float(record[name] or 0.0) for record in records]

    return {
        **{
            name: sum(values(name))
            for name in ("groups/sampled", "groups/all_correct", "groups/all_wrong")
        },
        **{
            name: float(np.mean(values(name)))
            for name in ("response_length/mean", "response_length/p95")
        },
    }
