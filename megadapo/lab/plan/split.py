"""The time of a step in any mode, and the split of GPUs between engines and trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megadapo.config import RunConfig
from megadapo.errors import ConfigError
from megadapo.lab.plan.cards import Card
from megadapo.lab.plan.engine import VirtualEngine, VirtualResponse
from megadapo.lab.plan.engine_speed import EngineSpeed, slots_of, speed_of
from megadapo.lab.plan.fit import problems
from megadapo.lab.plan.phases import Models
from megadapo.lab.plan.responses import KEPT_SHARE, Responses
from megadapo.lab.plan.step_time import forward_passes, train_seconds
from megadapo.models.description import ModelDescription
from megadapo.rollout.config import SamplingConfig
from megadapo.trainer.config import TrainerConfig

PUBLISH_S = 2.0
"""Seconds in which engines with GPUs of their own are stopped to take weights."""
SWITCH_S = 38.0
"""Seconds of a step in which shared GPUs go from engines to trainer and back, with the weights."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """A trainer and engines, usually with GPUs of their own."""

    trainer: TrainerConfig
    num_engines: int
    gpus_per_engine: int
    train_s: float = 0.0
    """Seconds in which this trainer works on a batch."""
    is_shared: bool = False
    """Whether engines and trainer use the same GPUs in turn."""

    @property
    def num_engine_gpus(self) -> int:
        return self.num_engines * self.gpus_per_engine

    @property
    def name(self) -> str:
        """Both numbers of GPUs, the engines' first."""
        if self.is_shared:
            return f"{self.num_engine_gpus} shared"
        return f"{self.num_engine_gpus} + {self.trainer.num_ranks}"


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The estimate of a step."""

    rollout_s: float
    """Seconds in which engines generate a batch."""
    train_s: float
    step_s: float
    engines_idle: float
    """Share of the engines' time without work."""
    trainer_idle: float
    """Share of a step in which the trainer waits for a batch."""


@dataclass(frozen=True)
class StepModel:
    """The model of a recipe's step on a card, with any split of GPUs."""

    config: RunConfig
    model: ModelDescription
    card: Card
    responses: Responses

    @cached_property
    def speed(self) -> EngineSpeed:
        return speed_of(self.config, self.model, self.card, self.responses)

    @cached_property
    def num_slots(self) -> int:
        return slots_of(self.config, self.model, self.card, self.responses)

    def own_split(self) -> Split:
        """Return the recipe's split."""
        rollout = self.config.rollout
        return self.timed(
            Split(
                trainer=self.config.trainer,
                num_engines=rollout.num_engines,
                gpus_per_engine=rollout.ranks_per_engine,
                is_shared=self.config.cluster.placement == "colocated",
            )
        )

    def shared_split(self, num_gpus: int) -> Split:
        """Return engines and a trainer that use all of these GPUs in turn.

        Raises:
            ConfigError: too few GPUs for one copy and one engine.
        """
        copy = _copy_size(self.config.trainer)
        gpus_per_engine = self.config.rollout.ranks_per_engine
        if num_gpus < max(copy, gpus_per_engine):
            raise ConfigError(
                f"{num_gpus} GPUs are too few for one copy of the trainer ({copy} GPUs) or one "
                f"engine ({gpus_per_engine} GPUs)"
            )
        return self.timed(
            Split(
                trainer=self.config.trainer.model_copy(update={"data_parallel": num_gpus // copy}),
                num_engines=num_gpus // gpus_per_engine,
                gpus_per_engine=gpus_per_engine,
                is_shared=True,
            )
        )

    def splits(self, num_gpus: int) -> list[Split]:
        """Return the splits of this many GPUs, smallest trainer first.

        A trainer has whole copies of the recipe's layout, or of that without pipeline stages.

        Raises:
            ConfigError: too few GPUs for one copy and one engine.
        """
        gpus_per_engine = self.config.rollout.ranks_per_engine
        found = []
        for trainer in _trainers(self.config, num_gpus):
            num_engines = (num_gpus - trainer.num_ranks) // gpus_per_engine
            if num_engines > 0:
                found.append(
                    Split(trainer=trainer, num_engines=num_engines, gpus_per_engine=gpus_per_engine)
                )
        if not found:
            raise ConfigError(
                f"{num_gpus} GPUs are too few for one copy of the trainer "
                f"({_copy_size(self.config.trainer)} GPUs) and one engine ({gpus_per_engine} GPUs)"
            )
        return [self.timed(split) for split in found]

    def by_estimate(self, splits: Sequence[Split], sampling: SamplingConfig) -> list[Split]:
        """Return splits by their estimated step, fastest first."""
        return sorted(splits, key=lambda one: self.step_time(one, sampling).step_s)

    def step_time(self, split: Split, sampling: SamplingConfig) -> StepTime:
        """Estimate the step of a mode.

        A mode that starts each batch anew waits for its longest response. In the others a response
        may take as many steps as its weights may be old.
        """
        train_s, staleness = split.train_s, sampling.max_staleness
        if sampling.mode in ("partial", "async"):
            moved = min(self.num_slots * split.num_engines, len(self.responses.lengths))
            context = self.responses.mean_sequence
            busy = self._full_seconds(split, num_batches=max(1, staleness)) + (
                moved * context * self.speed.prefill_s / split.num_engines
            )
            longest = float(self.responses.lengths[0]) * self.speed.step_time(1, 0.0)
            rollout_s = max(busy, longest / max(1, staleness))
        else:
            busy = self._full_seconds(split, num_batches=1)
            rollout_s = self._drain_seconds(split)
        if split.is_shared:
            step_s = rollout_s + train_s + SWITCH_S
        else:
            step_s = max(rollout_s, train_s) + PUBLISH_S
        return StepTime(
            rollout_s=rollout_s,
            train_s=train_s,
            step_s=step_s,
            engines_idle=max(0.0, 1.0 - busy / (rollout_s if split.is_shared else step_s)),
            trainer_idle=1.0 - train_s / step_s,
        )

    def _full_seconds(self, split: Split, *, num_batches: int) -> float:
        """Return the seconds in which engines that always work generate a step's responses.

        Args:
            num_batches: batches in flight at a time.
        """
        speed, responses = self.speed, self.responses
        number = len(responses.lengths) / split.num_engines
        running = max(1.0, min(self.num_slots, number * num_batches))
        token_s = speed.step_time(running, running * responses.running_context) / running
        prompt = responses.prompt_tokens / self.config.sampling.responses_per_prompt
        return number * (responses.mean * token_s + prompt * speed.prefill_s)

    def _drain_seconds(self, split: Split) -> float:
        """Return the seconds in which an engine with the longest response runs empty."""
        lengths = self.responses.lengths[:: split.num_engines]
        engine = VirtualEngine(self.speed, num_slots=self.num_slots)
        size = self.config.sampling.responses_per_prompt
        mixed = np.random.default_rng(0).permutation(lengths)
        engine.add(
            [
                VirtualResponse(
                    key=place // size,
                    index=place % size,
                    priority=0,
                    num_prompt=self.responses.prompt_tokens,
                    num_tokens=int(num_tokens),
                    num_cached=self.responses.prompt_tokens if place % size else 0,
                )
                for place, num_tokens in enumerate(mixed)
            ]
        )
        now = 0.0
        while engine.load:
            now = engine.next_event()
            engine.run_event(now)
        return now

    def timed(self, split: Split, num_forwards: int | None = None) -> Split:
        """Return the split with its trainer's seconds.

        Args:
            num_forwards: forward passes before the first update; None: the recipe's.
        """
        config = with_split(self.config, split)
        if num_forwards is None:
            num_forwards = forward_passes(config, self.model)
        train_s = train_seconds(config, self.model, self.card, self.responses, num_forwards)
        return replace(split, train_s=train_s)


def describe_step(config: RunConfig, models: Models, card: Card) -> list[str]:
    """Describe the recipe's step and, in modes that overlap, the best split, one line each.

    A split that does not fit on the card is not recommended.
    """
    sampling = config.sampling
    steps = StepModel(config, models.policy, card, Responses.of(config))
    own = steps.own_split()

    def described(split: Split) -> str:
        time = steps.step_time(split, sampling)
        return (
            f"a step of {time.step_s:,.0f} s: rollout {time.rollout_s:,.0f}, train "
            f"{time.train_s:,.0f}; engines without work {time.engines_idle:.0%} and the trainer "
            f"{time.trainer_idle:.0%} of it"
        )

    lines = [f"{own.name} GPUs{'' if own.is_shared else ' (engines + trainer)'}, {described(own)}"]
    if sampling.overlaps:
        num_gpus = own.num_engine_gpus + own.trainer.num_ranks
        ordered = steps.by_estimate(steps.splits(num_gpus), sampling)
        fitting = (one for one in ordered if not problems(with_split(config, one), models, card))
        best = next(fitting, None)
        if best is not None and best.name != own.name:
            trainer = best.trainer
            lines.append(
                f"the best split of {num_gpus}: {best.name} GPUs, {described(best)}: "
                f"rollout.num_engines = {best.num_engines}, trainer.data_parallel = "
                f"{trainer.data_parallel}, trainer.pipeline_parallel = {trainer.pipeline_parallel}"
            )
    mixed = f", {KEPT_SHARE:.0%} of groups mixed" if sampling.selection == "signal" else ""
    lines.append(
        f"  responses of {steps.responses.mean:,.0f} tokens on average{mixed}; docs/clusters.md has "
        "the errors of such forecasts for published runs"
    )
    return lines


def with_split(config: RunConfig, split: Split) -> RunConfig:
    """Return the recipe with another trainer and number of engines."""
    rollout = config.rollout.model_copy(update={"num_engines": split.num_engines})
    return config.model_copy(update={"trainer": split.trainer, "rollout": rollout})


def _trainers(config: RunConfig, num_gpus: int) -> Iterator[TrainerConfig]:
    """Yield layouts with whole copies of the model, without stages where no other has as many."""
    whole = config.trainer
    flat = whole.model_copy(
        update={
            "pipeline_parallel": 1,
            "virtual_pipeline": 1,
            "first_stage_layers": 0,
            "last_stage_layers": 0,
        }
    )
    stages = whole.pipeline_parallel
    for number in range(1, num_gpus * stages // _copy_size(whole) + 1):
        layout, copies = (flat, number) if number % stages else (whole, number // stages)
        trainer = layout.model_copy(update={"data_parallel": copies})
        experts = trainer.expert_parallel * trainer.expert_tensor_parallel
        is_even = trainer.tensor_parallel * trainer.num_replicas % experts == 0
        if is_even and copies <= config.algorithm.responses_per_mini_batch:
            yield trainer


def _copy_size(trainer: TrainerConfig) -> int:
    return trainer.num_ranks // trainer.data_parallel
