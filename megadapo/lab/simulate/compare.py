"""Every policy under the same assumptions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from megadapo.config import RunConfig
from megadapo.errors import ConfigError
from megadapo.lab.simulate.engines import EngineSettings
from megadapo.lab.simulate.fit import RunFit
from megadapo.lab.simulate.lengths import read_lengths
from megadapo.lab.simulate.policies import all_policies
from megadapo.lab.simulate.simulation import PolicyResult, pooled, simulate
from megadapo.lab.simulate.task import Task, TaskSettings
from megadapo.rollout.config import SamplingConfig

MAX_ENGINES = 64


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What the policies are compared under."""

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
        """Take sizes from the recipe, the rest from a run if there is one, and what is given.

        Raises:
            ConfigError: these assumptions cannot hold together.
            DataError: there are no lengths to read.
        """
        rollout, sampling = config.rollout, config.sampling
        if num_engines is not None and not 1 <= num_engines <= MAX_ENGINES:
            raise ConfigError(f"--engines {num_engines}: 1 to {MAX_ENGINES} can be simulated")
        engines = EngineSettings(
            num_engines=num_engines or rollout.num_engines, num_slots=rollout.max_num_seqs
        )
        task = TaskSettings()
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


def compare(assumptions: Assumptions, *, num_steps: int, num_seeds: int = 1) -> list[PolicyResult]:
    """Run every policy on the same prompts and answers.

    Args:
        num_steps: of each policy and seed.
        num_seeds: sets of prompts and answers, from the seed of the assumptions on.

    Raises:
        ConfigError: there is no such task, or no step to count.
        SamplingError: a batch cannot be filled.
    """
    if num_steps < 1 or num_seeds < 1:
        raise ConfigError(
            f"--steps {num_steps} --seeds {num_seeds}: at least one step must count, of one seed"
        )
    first = assumptions.task.seed
    tasks = [Task(replace(assumptions.task, seed=first + i)) for i in range(num_seeds)]
    return [
        pooled([simulate(policy, assumptions.engines, task, num_steps=num_steps) for task in tasks])
        for policy in all_policies(assumptions.sampling)
    ]


def title(assumptions: Assumptions) -> str:
    """Say in one line what is simulated."""
    sampling, engines, task = assumptions.sampling, assumptions.engines, assumptions.task
    return (
        f"{sampling.prompts_per_step} groups of {sampling.responses_per_prompt} on "
        f"{engines.num_engines} engines of {engines.num_slots} slots, "
        f"{task.keep_rate:.0%} of groups with a signal"
    )
