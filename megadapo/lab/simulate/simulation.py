"""Simulation of every policy under the same assumptions, and its results as tables and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
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
from megadapo.lab.simulate.policies import Policy, all_policies
from megadapo.lab.simulate.task import Task, TaskSettings, read_lengths
from megadapo.observe.tables import TextTable
from megadapo.plan.responses import mean_response, usual_lengths
from megadapo.rollout.config import SamplingConfig

MAX_ENGINES = 64
NUM_STEPS = 4
BASELINE = "rounds-3x"
"""Name of the policy whose time is the unit of the column `x`."""
CAPTION = f"""\
seconds: until a batch is full; +-: standard error; x: multiples of {BASELINE}; gen.: tokens
generated per token trained; used: share of mixed groups' tokens trained on; bias: of the mean
length; staleness: mean/largest, in weight publications; slots: share in use"""


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """The sizes, engines and task that all policies share."""

    sampling: SamplingConfig
    engines: EngineSettings
    task: TaskSettings

    @classmethod
    def of(
        cls,
        config: RunConfig,
        fit: RunFit | None = None,
        *,
        num_engines: int | None = None,
        lengths: Path | None = None,
        keep_rate: float | None = None,
        solved_share: float | None = None,
    ) -> Assumptions:
        """Combine the recipe's sizes, the fit of a run, and the given values; the latter win.

        Raises:
            ConfigError: the assumptions contradict each other.
            DataError: `lengths` cannot be read.
        """
        rollout, sampling = config.rollout, config.sampling
        if num_engines is not None and not 1 <= num_engines <= MAX_ENGINES:
            raise ConfigError(f"--engines {num_engines}: must be 1 to {MAX_ENGINES}")
        engines = EngineSettings(
            num_engines=num_engines or rollout.num_engines, num_slots=rollout.max_num_seqs
        )
        task = TaskSettings(lengths=usual_lengths(mean_response(config)))
        if fit is not None:
            engines, task = replace(engines, speed=fit.engines.speed), fit.task
        task = replace(
            task,
            num_responses=sampling.responses_per_prompt,
            max_tokens=rollout.max_response_tokens,
            seed=config.run.seed,
        )
        if lengths is not None:
            task = replace(task, lengths=read_lengths(lengths))
        if keep_rate is not None:
            task = replace(task, keep_rate=keep_rate, solved_share=None)
        if solved_share is not None:
            task = replace(task, solved_share=solved_share)
        return cls(sampling=sampling, engines=engines, task=task)

    @property
    def title(self) -> str:
        """The assumptions in one line."""
        sampling, engines, task = self.sampling, self.engines, self.task
        return (
            f"{sampling.prompts_per_step} groups of {sampling.responses_per_prompt} on "
            f"{engines.num_engines} engines of {engines.num_slots} slots, "
            f"{task.keep_rate:.0%} of groups mixed"
        )


def compare(assumptions: Assumptions, *, num_steps: int, num_seeds: int = 1) -> list[StepMeasures]:
    """Run every policy on the same prompts and answers.

    Args:
        num_steps: measured steps of each policy and seed.
        num_seeds: sets of prompts and answers; seeds count up from the assumptions' seed.

    Raises:
        ConfigError: the task is impossible, or a number is below 1.
        SamplingError: a batch cannot be filled.
    """
    if num_steps < 1 or num_seeds < 1:
        raise ConfigError(f"--steps {num_steps} --seeds {num_seeds}: both must be at least 1")
    first = assumptions.task.seed
    tasks = [Task(replace(assumptions.task, seed=first + i)) for i in range(num_seeds)]
    return [
        pooled([simulate(policy, assumptions.engines, task, num_steps=num_steps) for task in tasks])
        for policy in all_policies(assumptions.sampling)
    ]


def simulate(
    policy: Policy,
    engine_settings: EngineSettings,
    task: Task,
    *,
    num_steps: int = NUM_STEPS,
    num_warm_up: int = NUM_WARM_UP,
) -> StepMeasures:
    """Run a policy from a cold start; all of its batches are trained on at once."""
    engines = VirtualEngines(engine_settings, task, dispatch=policy.dispatch)
    source = policy.start(policy.sampling, engines, task)

    def batches() -> Iterator[SimulatedStep]:
        while True:
            start, version = engines.now, engines.policy_version + policy.versions_behind
            groups = source.next_batch()
            seconds = engines.now - start
            source.publish()
            yield SimulatedStep(seconds=seconds, waited_s=seconds, version=version, groups=groups)

    return measure(
        policy.name,
        batches(),
        engines,
        num_steps=num_steps,
        num_warm_up=num_warm_up,
        is_redrawn=policy.sampling.mode != "partial",
    )


def pooled(results: Sequence[StepMeasures]) -> StepMeasures:
    """Combine repetitions of one policy with equally many steps."""
    seconds = tuple(one for result in results for one in result.seconds)
    means: dict[str, Any] = {
        name: float(np.mean([getattr(result, name) for result in results]))
        for name in (
            "step_s",
            "waited_s",
            "engines_idle",
            "slot_use",
            "generated_per_trained",
            "kept_tokens_trained",
            "length_bias",
            "staleness_mean",
        )
    }
    return replace(
        results[0],
        seconds=seconds,
        step_error=standard_error(seconds),
        staleness_max=max(result.staleness_max for result in results),
        num_dropped=sum(result.num_dropped for result in results),
        **means,
    )


def results_table(results: Sequence[StepMeasures], title: str) -> str:
    """Return a table with one row per policy."""
    baseline = next(one.step_s for one in results if one.name == BASELINE)
    rows = [
        [
            one.name,
            f"{one.step_s:,.1f}",
            "" if one.step_error is None else f"{one.step_error / one.step_s:.0%}",
            f"{one.step_s / baseline:.2f}",
            f"{one.generated_per_trained:.2f}",
            f"{one.kept_tokens_trained:.0%}",
            f"{one.length_bias:+.1%}",
            f"{one.staleness_mean:.2f}/{one.staleness_max}",
            f"{one.slot_use:.0%}",
        ]
        for one in results
    ]
    head = ["policy", "seconds", "+-", "x", "gen.", "used", "bias", "staleness", "slots"]
    return TextTable(title=title, note=CAPTION, head=head, rows=rows).text()


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


def write_json(results: Sequence[StepMeasures], assumptions: Assumptions, path: Path) -> None:
    """Write the assumptions and, under "policies", one object per policy."""
    document = {
        "engines": asdict(assumptions.engines),
        "task": assumptions.task.to_json(),
        "policies": [asdict(one) for one in results],
    }
    write_record(path, document)
