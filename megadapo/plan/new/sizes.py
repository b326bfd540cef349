"""The rules by which `megadapo new` chooses sizes; docs/new.md explains them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np

from megadapo.cluster.machine import GIB, usable_cores
from megadapo.data.group import Group
from megadapo.errors import ConfigError
from megadapo.models.description import ModelDescription
from megadapo.plan.cards import GPUS_PER_NODE, Card
from megadapo.plan.fit import CROWDED, largest_share, overflows
from megadapo.plan.forecast import step_seconds
from megadapo.plan.new.draft import Draft
from megadapo.plan.phases import Models, gpu_kinds, longest_sequence
from megadapo.plan.ranks import engine_bytes, rank_kinds
from megadapo.plan.responses import Responses, usual_lengths
from megadapo.rollout.engine.spec import validate_engine_layout
from megadapo.trainer.config import TrainerConfig
from megadapo.trainer.model.model_layout import validate_model_layout
from megadapo.weights.layout.layout import ModelLayout

NUM_SAMPLED, GROUP = 16, 8
"""Prompts of the samples, and responses to each."""
SAMPLING_S, RUN_S = 120.0, 600.0
"""Seconds on cores: of samples that are all as long as they may be, and of all steps."""
CORE_PROMPTS, GPU_PROMPTS = (32, 16, 8), (512, 256, 128, 64, 32, 16)
"""Prompts of a step to try; the first on GPUs is the paper's."""
MIN_STEPS, CORE_STEPS, GPU_STEPS = 12, 30, 200
"""Fewest and most steps of a run on cores, and those of a run on GPUs."""
EVALUATION_STEPS = 2
"""Responses of an evaluation on cores, in batches of a step; each problem has at least one."""
SMALL = 20e6
"""Parameters below which a second engine on cores is worth more than a second thread."""
LR, MIN_LR = 0.045, 1e-6
"""Learning rate of a model of width 1 with one update, and the smallest one."""
MIN_CACHED = 16
"""Longest sequences that the cache of an engine on GPUs holds at least."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Responses of the base model to some training prompts."""

    groups: Sequence[Group]
    scores: Sequence[Sequence[float]]
    """1 or 0 for each response of each group; rewards if no function says what is correct."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of all responses, longest first."""
        return -np.sort([-length for group in self.groups for length in group.lengths])

    @property
    def better_lengths(self) -> list[int]:
        """Tokens of the responses that score above the mean of their group; all if none does."""
        pairs = zip(self.groups, self.scores, strict=True)
        return [
            length
            for group, scores in pairs
            for length, one in zip(group.lengths, scores, strict=True)
            if one > fmean(scores) or not self.num_mixed
        ]

    @property
    def num_mixed(self) -> int:
        """Number of groups whose responses have different scores."""
        return sum(len(set(group)) > 1 for group in self.scores)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts that the rules read."""

    model: ModelDescription
    prompt_tokens: int
    """Tokens of the longest prompt."""
    num_held_out: int
    """Number of held-out rows."""
    card: Card | None
    """Kind of the GPUs; None: this machine's cores."""
    num_gpus: int
    memory_gib: float
    """Main memory of this machine."""
    samples: Samples | None = None

    @property
    def num_parameters(self) -> int:
        """Number of the model's parameters."""
        layout = ModelLayout(self.model.family, self.model.shape)
        return rank_kinds(layout, TrainerConfig())[0].num_parameters


def choose_sizes(draft: Draft, facts: Facts) -> None:
    """Set the keys of lengths, hardware, batch and schedule.

    Raises:
        ConfigError: the model does not fit, or keys of the user do not fit each other.
    """
    prompts: Sequence[int] = CORE_PROMPTS
    group, most_s = GROUP, RUN_S / 24
    if facts.card is not None:
        prompts, group, most_s = GPU_PROMPTS, 2 * GROUP, 300.0 * math.cbrt(facts.num_gpus)
    elif (samples := facts.samples) is not None and 2 * samples.num_mixed < len(samples.scores):
        group = 2 * GROUP
    set_batch(draft, prompts[0], group)
    if facts.card is None:
        _fit_cores(draft, facts)
    else:
        _fit_gpus(draft, facts, facts.card)
    for number in prompts:
        set_batch(draft, number, group, f"a step then takes at most {most_s:,.0f} s")
        if (step_s := forecast(draft, facts)) <= most_s:
            break
    else:
        set_batch(draft, prompts[-1], group, f"a step takes more than {most_s:,.0f} s even so")
    _set_schedule(draft, facts, max(MIN_STEPS, min(CORE_STEPS, int(RUN_S / step_s))))


def forecast(draft: Draft, facts: Facts, changes: Mapping[str, Any] | None = None) -> float:
    """Return the seconds of a step of the recipe, or of one with changes."""
    config, samples, model = draft.config(changes), facts.samples, facts.model
    if samples is None or facts.card is not None:
        # responses grow in a long run
        return step_seconds(config, model, facts.card, Responses.of(config))[1]
    prompt = round(fmean(len(group.prompt_ids) for group in samples.groups))
    lengths = usual_lengths(float(samples.lengths.mean()))
    kept = max(0.1, samples.num_mixed / len(samples.groups))
    responses = Responses.of(config, lengths, keep_rate=kept, prompt_tokens=prompt)
    _, step_s = step_seconds(config, model, None, responses)
    # these cores may be faster or busier than those of the forecast
    sampled_s, _ = step_seconds(config, model, None, Responses(samples.lengths, prompt))
    return step_s * max(group.seconds for group in samples.groups) / sampled_s


def set_batch(draft: Draft, prompts: int, group: int, reason: str = "") -> None:
    """Set the prompts of a step, their responses, and at most 16 updates of at least 64."""
    size = draft.set("sampling.prompts_per_step", prompts, reason)
    size *= draft.set("sampling.responses_per_prompt", group)
    draft.set("algorithm.responses_per_mini_batch", min(size, max(64, size // 16)))


def _set_lengths(draft: Draft, facts: Facts, wanted: int, reason: str) -> int:
    """Set the longest response, its buffer and the longest prompt; return the first."""
    context, prompt = facts.model.max_positions, _round_up(facts.prompt_tokens, 16)
    if context <= prompt:
        raise ConfigError(f"a prompt has {facts.prompt_tokens} tokens, the model reads {context}")
    wanted = min(wanted, context - prompt)
    longest: int = draft.set("rollout.max_response_tokens", wanted, reason)
    config = draft.config({"algorithm.overlong_buffer": 0})
    # an environment's answers count as tokens
    draft.set("algorithm.overlong_buffer", 0 if config.rollout.environments else longest // 5)
    most = config.data.max_prompt_tokens
    if prompt > most or most + longest > context:
        reason = f"the longest has {facts.prompt_tokens} tokens; the model reads {context:,}"
        draft.set("data.max_prompt_tokens", prompt, reason)
    return longest


def _sampled_length(samples: Samples) -> tuple[int, str]:
    """Return the longest response by the samples, and the reason."""
    most = float(np.quantile(samples.better_lengths, 0.95))
    reason = f"half more than the {most:.0f} tokens of 95 % of the better samples"
    return max(32, _round_up(1.5 * most, 16)), reason


def _fit_cores(draft: Draft, facts: Facts) -> None:
    """Set type, engines and lengths for this machine's cores."""
    draft.set("model.dtype", "float32", "there is no GPU")
    cores, num_engines, size = usable_cores(), 1, facts.num_parameters
    if size < SMALL:
        num_engines = draft.set("rollout.num_engines", 2, "the model is small")
    else:
        draft.set("trainer.tokens_per_micro_batch", 2048, "for less memory")
    draft.set("rollout.num_threads", max(1, cores // num_engines))
    # weights, gradients and two moments of the trainer; weights of the engines
    needed_gib = size * 4 * (4 + num_engines) / GIB
    if needed_gib > 0.7 * facts.memory_gib:
        raise ConfigError(
            f"the model takes {needed_gib:.0f} GiB without activations, and this machine has "
            f"{facts.memory_gib:.0f}: take a smaller one, or plan for GPUs with --gpu"
        )
    if facts.samples is not None:
        _set_lengths(draft, facts, *_sampled_length(facts.samples))
        return
    for tokens in (1024, 512, 256, 128, 64):
        longest = _set_lengths(draft, facts, tokens, "as long as samples may take")
        responses = Responses(np.full(NUM_SAMPLED * GROUP, longest), facts.prompt_tokens)
        if step_seconds(draft.config(), facts.model, None, responses)[0] <= SAMPLING_S:
            return


def _fit_gpus(draft: Draft, facts: Facts, card: Card) -> None:
    """Set the lengths and the fastest split of the GPUs that fits."""
    wanted = min(20480, _round_up(4096 * math.sqrt(facts.num_parameters / 1.6e9), 2048))
    reason = "a guess by the model's size"
    if facts.samples is not None:
        sampled, reason = _sampled_length(facts.samples)
        wanted, reason = max(sampled, wanted), f"{reason}; it may grow"
    while wanted >= 256:
        _set_lengths(draft, facts, wanted, reason)
        for on_cpu in (False, True):
            fitting = [
                (forecast(draft, facts, changes), number, changes)
                for number, changes in enumerate(_splits(draft, facts, card, on_cpu))
            ]
            if fitting:
                for key, value in min(fitting)[2].items():
                    draft.set(key, value)
                return
        wanted, reason = wanted // 2, "longer ones do not fit"
    raise ConfigError(f"no split of {facts.num_gpus} {card.name} fits: take more with --gpus")


def _splits(draft: Draft, facts: Facts, card: Card, on_cpu: bool) -> Iterator[dict[str, Any]]:
    """Yield the splits of trainer and engines that fit, those with the fewest messages first.

    `on_cpu`: whether the optimizer works in main memory.
    """
    models, num_gpus = Models(policy=facts.model), facts.num_gpus
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if num_gpus % size == 0]
    recomputed: tuple[Any, ...] = ((), ("mlp",), "full")
    engines = [size for size in sizes if size <= GPUS_PER_NODE]
    for size, recompute, engine in product(sizes, recomputed, engines):
        tensor = min(size, GPUS_PER_NODE)
        changes = {
            "rollout.num_engines": num_gpus // engine,
            "rollout.tensor_parallel": engine,
            "trainer.tensor_parallel": tensor,
            "trainer.pipeline_parallel": size // tensor,
            "trainer.data_parallel": num_gpus // size,
            "trainer.sequence_parallel": tensor > 1,
            "trainer.recompute": recompute,
            "trainer.offload": ("optimizer", "gradients", *("parameters",) * on_cpu),
            "trainer.optimizer.cpu_offload_fraction": float(on_cpu),
        }
        config = draft.config(changes)
        with suppress(ConfigError):
            validate_model_layout(models.policy, config.trainer)
            validate_engine_layout(models.policy.shape, config.rollout)
            changes["rollout.gpu_memory_utilization"] = largest_share(config, models, card)
            config = draft.config(changes)
            cached = engine_bytes(config, models.policy, card).cache_tokens
            is_over = overflows(gpu_kinds(config, models, card), card, CROWDED)
            has_cache = cached >= MIN_CACHED * longest_sequence(config)
            if has_cache and not is_over and config.trainer.num_ranks == num_gpus:
                yield changes


def _set_schedule(draft: Draft, facts: Facts, core_steps: int) -> None:
    """Set the number of steps, the learning rate and the evaluations."""
    on_cores, width = facts.card is None, facts.model.shape.hidden_size
    steps = draft.set("run.num_steps", core_steps if on_cores else GPU_STEPS)
    config = draft.config()
    batch = config.sampling.prompts_per_step * config.sampling.responses_per_prompt
    updates = steps * batch // config.algorithm.responses_per_mini_batch
    lr = max(MIN_LR, LR / width / math.sqrt(updates))
    reason = f"{LR:g} / {width} (width) / root of {updates:,} updates, at least {MIN_LR:g}"
    draft.set("trainer.optimizer.lr", float(f"{lr:.0e}"), reason)
    draft.set("trainer.optimizer.warmup_steps", min(20, steps // 10))
    draft.set("evaluation.every", max(1, steps // 3) if on_cores else 10)
    few = max(1, min(4, EVALUATION_STEPS * batch // max(1, facts.num_held_out)))
    draft.set("evaluation.samples_per_problem", few if on_cores else 16)
    if facts.num_gpus > GPUS_PER_NODE:
        draft.set("cluster.address", "auto", "several nodes: ray start on each")


def _round_up(number: float, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
