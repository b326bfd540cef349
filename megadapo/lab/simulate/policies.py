"""Policies that fill a batch: every mode of the product's sampler."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

from megadapo.config import RunConfig
from megadapo.data.group import Group
from megadapo.data.prompts import PromptStream
from megadapo.errors import ConfigError
from megadapo.lab.simulate.engines import EngineSettings, VirtualEngines
from megadapo.lab.simulate.task import TaskSettings, TaskVerifier, ToyTask, task_tokenizer
from megadapo.plan.cards import Card
from megadapo.plan.phases import models_of
from megadapo.plan.responses import Responses
from megadapo.plan.split import Split, StepModel
from megadapo.rollout.config import SamplingConfig
from megadapo.rollout.episodes.requests import EpisodeRequests
from megadapo.rollout.sampling.sampler import Sampler
from megadapo.rollout.types import SamplingSettings

STALENESS = 2
"""Least `sampling.max_staleness` of async, and of the second row of partial."""


class OurSampler:
    """The product's own sampler."""

    def __init__(self, config: SamplingConfig, engines: VirtualEngines, task: ToyTask) -> None:
        self._engines = engines
        self.num_dropped = 0
        """Mixed groups that were too old for the last batch."""
        self._sampler = Sampler(
            engines,
            PromptStream(task.prompts, task.settings.seed),
            TaskVerifier(),
            config,
            settings=SamplingSettings(
                temperature=1.0, top_p=1.0, max_tokens=task.settings.max_tokens
            ),
            episodes=EpisodeRequests(
                tokenizer=task_tokenizer(task.settings), seed=task.settings.seed
            ),
            new_executor=ImmediateExecutor,
        )

    def next_batch(self) -> Sequence[Group]:
        batch = self._sampler.next_batch()
        self.num_dropped = len(batch.dropped)
        return batch.groups

    def generate(self, until: float) -> None:
        """Use the engines until a time on the clock, and until they may stop for weights."""
        engines, sampler = self._engines, self._sampler
        engines.deadline = until
        while engines.now < until:
            if not sampler.turn():
                # every group that a batch could use has ended
                engines.pass_time(until - engines.now)
        engines.deadline = math.inf
        while not sampler.can_pause:
            sampler.turn()
        sampler.pause_for_weights()

    def publish(self) -> None:
        """Give the engines new weights."""
        self._engines.publish()
        self._sampler.resume_sampling(self._engines.policy_version)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A way to fill batches, and to train on them."""

    name: str
    sampling: SamplingConfig
    engines: EngineSettings
    split: Split
    plan_s: float
    """Seconds of a step by `megadapo plan`."""


def policies_on_gpus(
    config: RunConfig,
    card: Card,
    task: TaskSettings,
    num_gpus: int | None = None,
    *,
    num_trainer_gpus: int | None = None,
    staleness: int | None = None,
) -> list[Policy]:
    """Return every mode, those with separate GPUs at the split that the plan recommends.

    `num_gpus`: by default those of the recipe.

    Raises:
        ConfigError: the GPUs do not suffice, or no trainer has so many.
    """
    steps = step_model_of(config, card, task)
    num_gpus = num_gpus or steps.own_split().num_gpus
    found = steps.splits(num_gpus)
    if num_trainer_gpus is not None:
        sizes = [one.trainer.num_ranks for one in found]
        found = [one for one in found if one.trainer.num_ranks == num_trainer_gpus]
        if not found:
            raise ConfigError(
                f"--trainer-gpus {num_trainer_gpus}: whole copies of the model have "
                f"{', '.join(map(str, sizes))} of the {num_gpus} GPUs"
            )
    shared, policies = steps.shared_split(num_gpus), []
    staleness = staleness or max(STALENESS, config.sampling.max_staleness)
    for mode in modes_of(config.sampling, staleness):
        split = steps.by_estimate(found, mode)[0] if mode.overlaps else shared
        policies.append(policy_on_split(steps, mode, split))
    return policies


def step_model_of(config: RunConfig, card: Card, task: TaskSettings) -> StepModel:
    """Return the estimates of `megadapo plan` with the responses of a task."""
    responses = Responses.of(
        config, task.lengths, keep_rate=task.keep_rate, prompt_tokens=task.prompt_tokens
    )
    return StepModel(config, models_of(config).policy, card, responses)


def policy_on_split(steps: StepModel, sampling: SamplingConfig, split: Split) -> Policy:
    """Return a mode whose engines and trainer have these GPUs."""
    return Policy(
        name=mode_name(sampling),
        sampling=sampling,
        engines=EngineSettings(
            num_engines=split.num_engines, num_slots=steps.num_slots, speed=steps.speed
        ),
        split=split,
        plan_s=steps.step_seconds(split, sampling),
    )


def modes_of(sampling: SamplingConfig, staleness: int) -> list[SamplingConfig]:
    """Return the configuration of each mode, sync first and async last."""
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


def mode_name(sampling: SamplingConfig) -> str:
    """Return the mode, and its largest staleness where that is above 1."""
    behind = sampling.max_staleness
    return sampling.mode if behind < 2 else f"{sampling.mode}, {behind} behind"


class ImmediateExecutor(Executor):
    """An executor that calls at once: scoring takes no time on the virtual clock."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future
