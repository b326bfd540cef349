"""Split of GPUs between engines and trainer: the possible ones, and a quick model of their steps.

The model has the engine speed of `megadapo simulate`, which runs the sampler instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megadapo.config import RunConfig
from megadapo.errors import ConfigError
from megadapo.lab.plan.cards import Card
from megadapo.lab.plan.engine_speed import EngineSpeed, running_context, slots_of, speed_of
from megadapo.lab.plan.fit import problems
from megadapo.lab.plan.phases import Models
from megadapo.lab.plan.step_time import (
    PROMPT_TOKENS,
    describe_responses,
    mean_response,
    num_responses,
    train_seconds,
)
from megadapo.models.description import ModelDescription
from megadapo.trainer.config import TrainerConfig

PUBLISH_S = 2.0
"""Seconds in which engines with GPUs of their own are stopped to take weights."""


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

    def timed(self, config: RunConfig, model: ModelDescription, card: Card) -> Split:
        """Return the split with its trainer's seconds at the roofline."""
        return replace(self, train_s=train_seconds(with_split(config, self), model, card))


@dataclass(frozen=True, kw_only=True)
class SplitTime:
    """The estimate of a split's step."""

    step_s: float
    engines_idle: float
    """Share of a step in which the engines have no work."""
    trainer_idle: float
    """Share of a step in which the trainer waits for a batch."""


def splits(config: RunConfig, model: ModelDescription, card: Card, num_gpus: int) -> list[Split]:
    """Return the splits of this many GPUs, smallest trainer first.

    A trainer has whole copies of the recipe's layout, or of that without pipeline stages.

    Raises:
        ConfigError: too few GPUs for one copy and one engine.
    """
    found = []
    for trainer in _trainers(config, num_gpus):
        gpus_per_engine = config.rollout.ranks_per_engine
        num_engines = (num_gpus - trainer.num_ranks) // gpus_per_engine
        if num_engines > 0:
            split = Split(trainer=trainer, num_engines=num_engines, gpus_per_engine=gpus_per_engine)
            found.append(split.timed(config, model, card))
    if not found:
        raise ConfigError(
            f"{num_gpus} GPUs are too few for one copy of the trainer "
            f"({_copy_size(config.trainer)} GPUs) and one engine "
            f"({config.rollout.ranks_per_engine} GPUs)"
        )
    return found


def shared_split(config: RunConfig, model: ModelDescription, card: Card, num_gpus: int) -> Split:
    """Return engines and a trainer that use all of these GPUs in turn.

    Raises:
        ConfigError: too few GPUs for one copy and one engine.
    """
    copy, gpus_per_engine = _copy_size(config.trainer), config.rollout.ranks_per_engine
    if num_gpus < max(copy, gpus_per_engine):
        raise ConfigError(
            f"{num_gpus} GPUs are too few for one copy of the trainer ({copy} GPUs) or one engine "
            f"({gpus_per_engine} GPUs)"
        )
    trainer = config.trainer.model_copy(update={"data_parallel": num_gpus // copy})
    return Split(
        trainer=trainer,
        num_engines=num_gpus // gpus_per_engine,
        gpus_per_engine=gpus_per_engine,
        is_shared=True,
    ).timed(config, model, card)


def split_time(
    config: RunConfig,
    split: Split,
    speed: EngineSpeed,
    num_slots: int,
    *,
    mode: str,
    staleness: int,
) -> SplitTime:
    """Estimate the step of a mode with separate GPUs.

    One step off, engines wait for the longest response of each batch, which starts when slots run
    empty. Otherwise a response may take `staleness` steps.
    """
    busy = generation_seconds(config, speed, num_slots, split.num_engines)
    longest = config.rollout.max_response_tokens
    if mode == "one_step_off":
        rollout_s = busy + longest * speed.step_time(1, 0.0)
    else:
        context = PROMPT_TOKENS + mean_response(config)
        num_moved = min(num_slots * split.num_engines, num_responses(config))
        busy += num_moved * context * speed.prefill_s / split.num_engines
        rollout_s = max(busy, longest * speed.step_s / staleness)
    step_s = max(rollout_s, split.train_s) + PUBLISH_S
    return SplitTime(
        step_s=step_s,
        engines_idle=1.0 - busy / step_s,
        trainer_idle=1.0 - split.train_s / step_s,
    )


def by_estimate(
    config: RunConfig,
    found: Sequence[Split],
    speed: EngineSpeed,
    num_slots: int,
    *,
    mode: str,
    staleness: int,
) -> list[Split]:
    """Return splits by their estimated step, fastest first."""
    return sorted(
        found,
        key=lambda one: (
            split_time(config, one, speed, num_slots, mode=mode, staleness=staleness).step_s
        ),
    )


def describe_split(config: RunConfig, models: Models, card: Card) -> list[str]:
    """Describe the steps of the recipe's split of its GPUs and of the best one, one line each.

    A split that does not fit on the card is not recommended.
    """
    speed = speed_of(config, models.policy, card)
    num_slots = slots_of(config, models.policy, card)
    sampling, rollout = config.sampling, config.rollout
    own = Split(
        trainer=config.trainer,
        num_engines=rollout.num_engines,
        gpus_per_engine=rollout.ranks_per_engine,
    ).timed(config, models.policy, card)
    num_gpus = own.num_engine_gpus + own.trainer.num_ranks

    def described(split: Split) -> str:
        time = split_time(
            config, split, speed, num_slots, mode=sampling.mode, staleness=sampling.max_staleness
        )
        return (
            f"{split.name} GPUs (engines + trainer), a step of {time.step_s:,.0f} s, engines "
            f"without work {time.engines_idle:.0%} and the trainer {time.trainer_idle:.0%} of it"
        )

    lines = [f"the recipe's split: {described(own)}"]
    ordered = by_estimate(
        config,
        splits(config, models.policy, card, num_gpus),
        speed,
        num_slots,
        mode=sampling.mode,
        staleness=sampling.max_staleness,
    )
    fitting = (one for one in ordered if not problems(with_split(config, one), models, card))
    best = next(fitting, None)
    if best is not None and best.name != own.name:
        trainer = best.trainer
        lines.append(
            f"the best split of {num_gpus}: {described(best)}: rollout.num_engines = "
            f"{best.num_engines}, trainer.data_parallel = {trainer.data_parallel}, "
            f"trainer.pipeline_parallel = {trainer.pipeline_parallel}"
        )
    lines.append(
        f"  {describe_responses(config)}, by the engines' speed of megadapo simulate, which runs "
        "the sampler instead"
    )
    return lines


def with_split(config: RunConfig, split: Split) -> RunConfig:
    """Return the recipe with another trainer and number of engines."""
    rollout = config.rollout.model_copy(update={"num_engines": split.num_engines})
    return config.model_copy(update={"trainer": split.trainer, "rollout": rollout})


def generation_seconds(
    config: RunConfig, speed: EngineSpeed, num_slots: int, num_engines: int
) -> float:
    """Return the seconds in which engines with full slots generate a step's responses."""
    number = num_responses(config)
    num_running = max(1.0, min(num_slots, number / num_engines))
    token_s = speed.step_time(1, running_context(config)) + speed.step_s * (1 / num_running - 1)
    prefill_s = PROMPT_TOKENS / config.sampling.responses_per_prompt * speed.prefill_s
    return number * (mean_response(config) * token_s + prefill_s) / num_engines


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
