"""Whole steps of every mode on equally many GPUs, with the training and the best split."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from megadapo.config import RunConfig
from megadapo.errors import ConfigError
from megadapo.lab.record import write_record
from megadapo.lab.simulate.engines import EngineSettings, VirtualEngines
from megadapo.lab.simulate.measures import NUM_WARM_UP, SimulatedStep, StepMeasures, measure
from megadapo.lab.simulate.policies import OurSampler, trained_groups
from megadapo.lab.simulate.task import Task, TaskSettings
from megadapo.models.description import ModelDescription
from megadapo.observe.tables import TextTable
from megadapo.plan.cards import Card
from megadapo.plan.responses import Responses
from megadapo.plan.split import PUBLISH_S, SWITCH_S, Split, StepModel
from megadapo.rollout.config import SamplingConfig
from megadapo.rollout.sampling.sampler import Sampler


def train(sampler: Sampler, engines: VirtualEngines, train_s: float) -> Iterator[SimulatedStep]:
    """Yield steps in which a trainer works on each batch for `train_s`.

    A mode that does not overlap uses the same GPUs for both, and loses SWITCH_S. With GPUs of their
    own, engines stop for PUBLISH_S to take weights.
    """
    overlaps = sampler.config.overlaps
    while True:
        start = engines.now
        while not sampler.can_take:
            sampler.turn()
        batch = sampler.take()
        trained = engines.now + train_s
        waited_s = engines.now - start
        if overlaps:
            _generate(sampler, engines, until=trained)
            while not sampler.can_pause:
                sampler.turn()
            waited_s += engines.now - trained
        sampler.pause_for_weights()
        engines.pass_time(PUBLISH_S if overlaps else train_s + SWITCH_S, have_gpus=overlaps)
        yield SimulatedStep(
            seconds=engines.now - start,
            waited_s=waited_s,
            version=engines.policy_version,
            groups=trained_groups(batch),
            num_dropped=len(batch.counters.dropped),
        )
        engines.publish()
        sampler.resume_sampling(engines.policy_version)


def _generate(sampler: Sampler, engines: VirtualEngines, *, until: float) -> None:
    """Let the sampler use the engines until a time on the clock."""
    engines.deadline = until
    while engines.now < until:
        if not sampler.turn():
            # every group that a batch could use has ended
            engines.pass_time(until - engines.now)
    engines.deadline = math.inf


BASELINE = "sync"
CAPTION = f"""\
GPUs: engines + trainer; step: seconds; +-: standard error; x: multiples of {BASELINE}; plan:
seconds by megadapo plan; wait: seconds of a step in which the trainer has nothing to do; idle:
engines' time without work; slots: share in use; staleness: mean/largest, in weight publications;
bias: of the mean length"""


@dataclass(frozen=True, kw_only=True)
class ClusterAssumptions:
    """The sizes, GPUs and task that all modes share."""

    steps: StepModel
    """The estimates of `megadapo plan`."""
    task: TaskSettings
    shared: Split
    """Engines and trainer on the same GPUs."""
    splits: tuple[Split, ...]
    """Possible engines and trainers with GPUs of their own."""
    num_gpus: int
    staleness: int
    """`sampling.max_staleness` of partial and async."""

    @classmethod
    def of(
        cls,
        config: RunConfig,
        model: ModelDescription,
        card: Card,
        task: TaskSettings,
        *,
        num_gpus: int,
        num_trainer_gpus: int | None = None,
        staleness: int | None = None,
    ) -> ClusterAssumptions:
        """Combine a recipe, a card and a number of GPUs.

        Raises:
            ConfigError: the GPUs do not suffice, or no trainer has so many.
        """
        responses = Responses.of(
            config, task.lengths, keep_rate=task.keep_rate, prompt_tokens=task.prompt_tokens
        )
        steps = StepModel(config, model, card, responses)
        found = steps.splits(num_gpus)
        if num_trainer_gpus is not None:
            sizes = [one.trainer.num_ranks for one in found]
            found = [one for one in found if one.trainer.num_ranks == num_trainer_gpus]
            if not found:
                raise ConfigError(
                    f"--trainer-gpus {num_trainer_gpus}: whole copies of the model have "
                    f"{', '.join(map(str, sizes))} of the {num_gpus} GPUs"
                )
        return cls(
            steps=steps,
            task=task,
            shared=steps.shared_split(num_gpus),
            splits=tuple(found),
            num_gpus=num_gpus,
            staleness=staleness or max(2, config.sampling.max_staleness),
        )

    def best_split(self, sampling: SamplingConfig) -> Split:
        """Return the split that `megadapo plan` recommends for a mode."""
        if not sampling.overlaps:
            return self.shared
        return self.steps.by_estimate(self.splits, sampling)[0]

    def engines(self, split: Split) -> EngineSettings:
        """Return a split's engines."""
        return EngineSettings(
            num_engines=split.num_engines, num_slots=self.steps.num_slots, speed=self.steps.speed
        )

    @property
    def title(self) -> str:
        """The assumptions in one line."""
        sampling = self.steps.config.sampling
        return (
            f"{sampling.prompts_per_step} groups of {sampling.responses_per_prompt} on "
            f"{self.num_gpus} {self.steps.card.name}, {self.task.keep_rate:.0%} of groups mixed"
        )


@dataclass(frozen=True, kw_only=True)
class Absence:
    """Engines that leave after the first measured step and return later."""

    num_engines: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepTime(StepMeasures):
    """A mode's steps."""

    max_staleness: int
    gpus: str
    """Number of the engines' and of the trainer's GPUs."""
    plan_s: float
    """Seconds of a step by `megadapo plan`."""
    train_s: float


def compare_steps(
    assumptions: ClusterAssumptions, *, num_steps: int, absence: Absence | None = None
) -> list[StepTime]:
    """Simulate every mode, those with separate GPUs at the split that the plan recommends.

    With an absence, async appears a second time, with engines that leave and return.

    Raises:
        ConfigError: the task is impossible, or no engine leaves, or all do.
        SamplingError: a batch cannot be filled.
    """
    task = Task(assumptions.task)
    found = []
    for sampling in modes_of(assumptions.steps.config.sampling, assumptions.staleness):
        split = assumptions.best_split(sampling)
        found.append(simulate_steps(assumptions, sampling, split, task, num_steps=num_steps))
    if absence is not None:
        if not 1 <= absence.num_engines < split.num_engines:
            raise ConfigError(
                f"--away {absence.num_engines}: at least 1 engine must leave, and at least 1 of "
                f"async's {split.num_engines} must stay"
            )
        found.append(
            simulate_steps(assumptions, sampling, split, task, num_steps=num_steps, absence=absence)
        )
    return found


def simulate_steps(
    assumptions: ClusterAssumptions,
    sampling: SamplingConfig,
    split: Split,
    task: Task,
    *,
    num_steps: int,
    absence: Absence | None = None,
) -> StepTime:
    """Simulate a mode's steps from a cold start."""
    name: str = sampling.mode
    engines = VirtualEngines(assumptions.engines(split), task)
    steps = train(OurSampler(sampling, engines, task).sampler, engines, split.train_s)
    if absence is not None:
        name += f", {absence.num_engines} of {split.num_engines} engines away"
        steps = _with_absence(steps, engines, absence)
    measures = measure(name, steps, engines, num_steps=num_steps, is_redrawn=not sampling.carries)
    return StepTime(
        **vars(measures),
        max_staleness=sampling.max_staleness,
        gpus=split.name,
        plan_s=assumptions.steps.step_seconds(split, sampling),
        train_s=split.train_s,
    )


def _with_absence(
    steps: Iterator[SimulatedStep], engines: VirtualEngines, absence: Absence
) -> Iterator[SimulatedStep]:
    yield from islice(steps, NUM_WARM_UP + 1)
    engines.plan_absence(absence.num_engines, absence.seconds)
    yield from steps


def modes_of(sampling: SamplingConfig, staleness: int) -> list[SamplingConfig]:
    """Return the configuration of each mode, async last."""
    plain = {"prompts_per_round": None, "on_shortfall": "train"}
    return [
        sampling.model_copy(update={**plain, "mode": mode, "max_staleness": number})
        for mode, number in (
            ("sync", 0),
            ("partial", 1),
            ("partial", staleness),
            ("one_step_off", 1),
            ("async", staleness),
        )
    ]


def step_table(results: Sequence[StepTime], title: str) -> str:
    """Return a table with one row per mode."""
    baseline = next(one.step_s for one in results if one.name == BASELINE)
    rows = [
        [
            one.name if one.max_staleness < 2 else f"{one.name}, {one.max_staleness} behind",
            one.gpus,
            f"{one.step_s:,.0f}",
            "" if one.step_error is None else f"{one.step_error / one.step_s:.0%}",
            f"{one.step_s / baseline:.2f}",
            f"{one.plan_s:,.0f}",
            f"{one.waited_s:,.0f}",
            f"{one.engines_idle:.1%}",
            f"{one.slot_use:.0%}",
            f"{one.staleness_mean:.2f}/{one.staleness_max}",
            f"{one.length_bias:+.1%}",
            str(one.num_dropped),
        ]
        for one in results
    ]
    head = ["mode", "GPUs", "step", "+-", "x", "plan", "wait", "idle", "slots", "staleness", "bias"]
    return TextTable(title=title, note=CAPTION, head=[*head, "dropped"], rows=rows).text()


def write_step_json(
    results: Sequence[StepTime], assumptions: ClusterAssumptions, path: Path
) -> None:
    """Write the assumptions and, under "modes", one object per mode."""
    document = {
        "num_gpus": assumptions.num_gpus,
        "card": assumptions.steps.card.name,
        "groups": assumptions.steps.config.sampling.prompts_per_step,
        "engines": asdict(assumptions.engines(assumptions.shared)),
        "task": assumptions.task.to_json(),
        "modes": [asdict(one) for one in results],
    }
    write_record(path, document)
