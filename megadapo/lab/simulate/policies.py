"""Policies that fill a batch: every mode of the product's sampler, and the baselines' rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import numpy as np

from megadapo.data.prompts import PromptStream, render
from megadapo.lab.simulate.engines import Dispatch, VirtualEngines
from megadapo.lab.simulate.task import Task, TaskVerifier, task_tokenizer
from megadapo.rollout.config import SamplingConfig
from megadapo.rollout.sampling.sampler import Sampler
from megadapo.rollout.sampling.statistics import SampledBatch
from megadapo.rollout.types import OpenGroup, SamplingSettings, response_seeds


@dataclass(frozen=True)
class TrainedGroup:
    """The policy versions of a group in a batch."""

    prompt_index: int
    policy_versions: tuple[np.ndarray, ...]
    """Version of each token, one array per response."""

    @property
    def num_tokens(self) -> int:
        return sum(len(versions) for versions in self.policy_versions)


class BatchSource(Protocol):
    """A policy in use."""

    def next_batch(self) -> Sequence[TrainedGroup]: ...

    def publish(self) -> None:
        """Give the engines new weights."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A way to fill a batch."""

    name: str
    sampling: SamplingConfig
    start: Callable[[SamplingConfig, VirtualEngines, Task], BatchSource]
    dispatch: Dispatch = "least_loaded"
    versions_behind: int = 0
    """Publications between the engines' weights and the weights that train on a batch."""


def all_policies(sampling: SamplingConfig) -> list[Policy]:
    """Return the policies for a batch of this size, baselines first."""
    size = sampling.prompts_per_step
    plain = sampling.model_copy(
        update={
            "mode": "sync",
            "max_staleness": 0,
            "prompts_per_round": None,
            "on_shortfall": "train",
        }
    )
    rounds = [
        Policy(
            name=f"rounds-{times}x",
            sampling=plain.model_copy(
                update={
                    "mode": "rounds",
                    "prompts_per_round": times * size,
                    "max_asked_per_prompt": max(sampling.max_asked_per_prompt, 10.0 * times),
                }
            ),
            start=OurSampler,
            dispatch="in_turn",
        )
        for times in (1, 3)  # verl's script has rounds of three times the batch
    ]
    first = Policy(name="first-finished", sampling=plain, start=FirstFinished)
    return [*rounds, first, *_ours(plain)]


def _ours(plain: SamplingConfig) -> list[Policy]:
    modes = (
        ("sync", "sync", 0),
        ("one-step-off", "one_step_off", 1),
        ("partial", "partial", 1),
        ("partial-2", "partial", 2),
    )
    return [
        Policy(
            name=name,
            sampling=plain.model_copy(update={"mode": mode, "max_staleness": staleness}),
            start=OurSampler,
            # it samples a step ahead of the trainer
            versions_behind=int(mode == "one_step_off"),
        )
        for name, mode, staleness in modes
    ]


class OurSampler:
    """The product's own sampler."""

    def __init__(self, config: SamplingConfig, engines: VirtualEngines, task: Task) -> None:
        self._engines = engines
        self.sampler = Sampler(
            engines,
            PromptStream(task.prompts, task.settings.seed),
            TaskVerifier(),
            config,
            settings=_sampling_settings(task),
            tokenizer=task_tokenizer(task.settings),
            seed=task.settings.seed,
            new_executor=ImmediateExecutor,
        )

    def next_batch(self) -> list[TrainedGroup]:
        return trained_groups(self.sampler.next_batch())

    def publish(self) -> None:
        self._engines.publish()
        self.sampler.resume_sampling(self._engines.policy_version)


def trained_groups(batch: SampledBatch) -> list[TrainedGroup]:
    """Return the policy versions of a batch."""
    return [
        TrainedGroup(group.prompt_index, tuple(one.policy_versions for one in group.responses))
        for group in batch.groups
    ]


class FirstFinished:
    """slime's rule: it requests twice the batch, and again on a shortfall, and keeps the fastest.

    Responses still in flight when the batch is full are dropped.
    """

    def __init__(self, config: SamplingConfig, engines: VirtualEngines, task: Task) -> None:
        self._config = config
        self._engines = engines
        self._task = task
        self._prompts = PromptStream(task.prompts, task.settings.seed)
        self._tokenizer = task_tokenizer(task.settings)
        self._prompt_indices = count()

    def next_batch(self) -> list[TrainedGroup]:
        needed = self._config.prompts_per_step
        kept: list[TrainedGroup] = []
        while len(kept) < needed:
            if len(kept) + self._engines.num_in_flight < needed:
                self._engines.submit([self._request() for _ in range(2 * needed)])
            for response in self._engines.finished():
                if self._engines.requested[response.key].is_mixed:
                    versions = tuple(one.policy_versions for one in response.responses)
                    kept.append(TrainedGroup(response.key, versions))
        self._engines.stop(keep=False)
        return kept[:needed]

    def publish(self) -> None:
        self._engines.publish()

    def _request(self) -> OpenGroup:
        index, task = next(self._prompt_indices), self._task.settings
        prompt = self._prompts.at(index)
        return OpenGroup(
            key=index,
            prompt_ids=tuple(render(prompt, self._tokenizer)),
            # the sampler's own seeds, so that all policies see the same answers
            seeds=response_seeds(task.num_responses, task.seed, "train", index, prompt.id),
            settings=_sampling_settings(self._task),
            priority=index,
        )


class ImmediateExecutor(Executor):
    """An executor that calls at once: scoring takes no time on the virtual clock."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _sampling_settings(task: Task) -> SamplingSettings:
    return SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=task.settings.max_tokens)
