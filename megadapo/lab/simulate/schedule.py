"""The schedule of a simulated cluster, with whose staleness a run can train on a few cores."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from megadapo.errors import ConfigError
from megadapo.lab.simulate.engines import VirtualEngines
from megadapo.lab.simulate.policies import OurSampler
from megadapo.lab.simulate.step_times import ClusterAssumptions, StepTime, modes_of
from megadapo.lab.simulate.task import Task
from megadapo.lab.simulate.training import train
from megadapo.rollout.simulated import SimulatedSchedule, ages_of


def simulate_schedule(
    assumptions: ClusterAssumptions, result: StepTime, *, num_steps: int
) -> SimulatedSchedule:
    """Return the ages of all tokens in the first steps of async, and in the groups they leave open.

    Args:
        result: the steps of async, at whose split of the GPUs it runs.

    Raises:
        SamplingError: a batch cannot be filled.
    """
    split = next(one for one in assumptions.splits if one.name == result.gpus)
    sampling = modes_of(assumptions.config.sampling, assumptions.staleness)[-1]
    task = Task(assumptions.task)
    engines = VirtualEngines(replace(assumptions.engines, num_engines=split.num_engines), task)
    steps = train(OurSampler(sampling, engines, task).sampler, engines, split.train_s)
    batches = tuple(
        tuple(
            ages_of(group.policy_versions, step.version + 1, sampling.max_staleness)
            for group in step.groups
        )
        for step in islice(steps, num_steps + sampling.max_staleness)
    )
    if any(len(batch) < sampling.prompts_per_step for batch in batches):
        raise ConfigError("--schedule: a batch is not full; raise --keep-rate")
    return SimulatedSchedule(
        title=f"{assumptions.title}, {split.name} of them, async, {sampling.max_staleness} behind",
        max_staleness=sampling.max_staleness,
        responses_per_prompt=sampling.responses_per_prompt,
        batches=batches,
    )
