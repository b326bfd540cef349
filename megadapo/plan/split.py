"""The time of a step in any mode, and the split of GPUs between engines and trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megadapo.config import RunConfig
from megadapo.errors import ConfigError
from megadapo.models.description import ModelDescription
from megadapo.plan.cards import Card
from megadapo.plan.engine import EngineSpeed, VirtualEngine, VirtualResponse, speed_of
from megadapo.plan.fit import problems
from megadapo.plan.phases import Models
from megadapo.plan.ranks import engine_bytes
from megadapo.plan.responses import KEPT_SHARE, Responses
from megadapo.plan.step_time import train_seconds
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
    def num_gpus(self) -> int:
        return self.num_engine_gpus + (0 if self.is_shared else self.trainer.num_ranks)

    @property
    def name(self) -> str:
        """Both numbers of GPUs, the engines' first."""
        if self.is_shared:
            return f"{self.num_engine_gpus} shared"
        return f"{self.num_engine_gpus} + {self.trainer.num_ranks}"


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
        """Responses that an engine runs at once, in its slots and in its cache."""
        engine = engine_bytes(self.config, self.model, self.card)
        num_cached = engine.cache_tokens / self.responses.running_context
        return max(1, min(self.config.rollout.max_num_seqs, int(num_cached)))

    def own_split(self) -> Split:
        """Return the recipe's split."""
        config = self.config
        is_shared = config.cluster.placement == "colocated"
        return self._split(config.trainer, config.rollout.num_engines, is_shared=is_shared)

    def shared_split(self, num_gpus: int) -> Split:
        """Return engines and a trainer that use all of these GPUs in turn."""
        copy = _copy_size(self.config.trainer)
        per_engine = self.config.rollout.ranks_per_engine
        if num_gpus < max(copy, per_engine):
            raise ConfigError(
                f"{num_gpus} GPUs are too few for one copy of the trainer ({copy} GPUs) or one "
                f"engine ({per_engine} GPUs)"
            )
        trainer = self.config.trainer.model_copy(update={"data_parallel": num_gpus // copy})
        return self._split(trainer, num_gpus // per_engine, is_shared=True)

    def splits(self, num_gpus: int) -> list[Split]:
        """Return the splits of this many GPUs, smallest trainer first.

        A trainer has whole copies of the recipe's layout, or of that without pipeline stages.
        """
        per_engine = self.config.rollout.ranks_per_engine
        found = [
            self._split(trainer, (num_gpus - trainer.num_ranks) // per_engine)
            for trainer in _trainers(self.config, num_gpus - per_engine)
        ]
        if not found:
            raise ConfigError(
                f"{num_gpus} GPUs are too few for one copy of the trainer "
                f"({_copy_size(self.config.trainer)} GPUs) and one engine ({per_engine} GPUs)"
            )
        return found

    def by_estimate(self, splits: Sequence[Split], sampling: SamplingConfig) -> list[Split]:
        """Return splits by their estimated step, fastest first."""
        return sorted(splits, key=lambda one: self.step_seconds(one, sampling))

    def step_seconds(self, split: Split, sampling: SamplingConfig) -> float:
        """Return the seconds of a mode's step."""
        rollout_s = self.rollout_seconds(split, sampling)
        if split.is_shared:
            return rollout_s + split.train_s + SWITCH_S
        return max(rollout_s, split.train_s) + PUBLISH_S

    def rollout_seconds(self, split: Split, sampling: SamplingConfig) -> float:
        """Return the seconds in which engines generate a mode's batch.

        A mode that starts every batch with new responses waits for its longest one. In the others
        engines always work, and a response may take as many steps as its weights may be old.
        """
        speed, responses = self.speed, self.responses
        number = len(responses.lengths) / split.num_engines
        if not sampling.carries:
            return self._drain_seconds(split)
        running = max(1.0, min(self.num_slots, number * sampling.max_staleness))
        token_s = speed.step_time(running, running * responses.running_context) / running
        prompt = responses.prompt_tokens / sampling.responses_per_prompt
        # new weights read running responses again
        moved = min(self.num_slots, number) * responses.mean_sequence
        busy = number * responses.mean * token_s + (number * prompt + moved) * speed.prefill_s
        longest = int(responses.lengths[0]) * speed.step_time(1, 0.0)
        return max(busy, longest / sampling.max_staleness)

    def _drain_seconds(self, split: Split) -> float:
        """Return the seconds in which the engine with the longest response runs empty."""
        engine = VirtualEngine(self.speed, num_slots=self.num_slots)
        lengths = np.random.default_rng(0).permutation(self.responses.lengths[:: split.num_engines])
        size, prompt = self.config.sampling.responses_per_prompt, self.responses.prompt_tokens
        engine.add(
            [
                VirtualResponse(
                    key=place // size,
                    index=place % size,
                    priority=0,
                    num_prompt=prompt,
                    num_tokens=int(num_tokens),
                    num_cached=prompt if place % size else 0,
                )
                for place, num_tokens in enumerate(lengths)
            ]
        )
        now = 0.0
        while engine.load:
            now = engine.next_event()
            engine.run_event(now)
        return now

    def _split(self, trainer: TrainerConfig, num_engines: int, *, is_shared: bool = False) -> Split:
        return Split(
            trainer=trainer,
            num_engines=num_engines,
            gpus_per_engine=self.config.rollout.ranks_per_engine,
            train_s=train_seconds(
                self.config.model_copy(update={"trainer": trainer}),
                self.model,
                self.card,
                self.responses,
            ),
            is_shared=is_shared,
        )


def describe_step(config: RunConfig, models: Models, card: Card, responses: Responses) -> list[str]:
    """Describe the recipe's step and, in modes that overlap, the best split, one line each.

    A split that does not fit on the card is not recommended.
    """
    sampling = config.sampling
    steps = StepModel(config, models.policy, card, responses)
    own = steps.own_split()

    def described(split: Split) -> str:
        return (
            f"{split.name} GPUs{'' if split.is_shared else ' (engines + trainer)'}, a step of "
            f"{steps.step_seconds(split, sampling):,.0f} s: rollout "
            f"{steps.rollout_seconds(split, sampling):,.0f}, train {split.train_s:,.0f}"
        )

    lines = [described(own)]
    if sampling.overlaps:
        ordered = steps.by_estimate(steps.splits(own.num_gpus), sampling)
        fitting = (one for one in ordered if not problems(_with_split(config, one), models, card))
        best = next(fitting, None)
        if best is not None and best.name != own.name:
            trainer = best.trainer
            lines.append(
                f"the best split of {own.num_gpus}: {described(best)}: "
                f"rollout.num_engines = {best.num_engines}, trainer.data_parallel = "
                f"{trainer.data_parallel}, trainer.pipeline_parallel = {trainer.pipeline_parallel}"
            )
    mixed = f", {KEPT_SHARE:.0%} of groups mixed" if sampling.selection == "signal" else ""
    lines.append(
        f"  responses of {responses.mean:,.0f} tokens on average{mixed}; docs/clusters.md has "
        "the errors of such forecasts for published runs"
    )
    return lines


def _with_split(config: RunConfig, split: Split) -> RunConfig:
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
