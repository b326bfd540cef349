"""Phases that do not fit on a card, the keys to change, and the longest sequence that fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megadapo.config import RunConfig
from megadapo.config.recipe import toml_value
from megadapo.plan.cards import GIB, MAIN_MEMORY_GIB, Card
from megadapo.plan.phases import (
    GpuKind,
    Models,
    Phase,
    gpu_kinds,
    host_items,
    longest_sequence,
    replayed_bytes,
)
from megadapo.plan.ranks import engine_bytes
from megadapo.trainer.config import StateKind

STEP_TOKENS = 256
"""Precision of the longest sequence, in tokens."""
WITH_BUDGET = ("start engines", "rollout", "restart engine")
"""Phases with rollout.gpu_memory_utilization of the card."""
ON_ONE = (
    "cluster.device=cuda",
    "cluster.placement=colocated",
    "model.dtype=bfloat16",
    "rollout.num_engines=1",
    "rollout.tensor_parallel=1",
    "trainer.tensor_parallel=1",
    "trainer.pipeline_parallel=1",
    "trainer.context_parallel=1",
    "trainer.data_parallel=1",
    "trainer.expert_parallel=1",
    "trainer.expert_tensor_parallel=1",
    "rollout.expert_parallel=false",
    "trainer.sequence_parallel=false",
    'trainer.recompute="full"',
    'trainer.offload=["gradients", "optimizer", "parameters"]',
    "trainer.optimizer.cpu_offload_fraction=1.0",
)
"""Overrides for the least memory on one GPU, which trainer and engine share: layers are recomputed,
and the optimizer's state is in main memory."""
CROWDED = 0.95
"""Share of a card above which a phase gets a warning, because the estimates are not exact."""


def overflows(kinds: list[GpuKind], card: Card, share: float = 1.0) -> list[tuple[GpuKind, Phase]]:
    """Return the phases of all kinds of GPU that exceed this share of the card's memory."""
    limit = share * card.memory_bytes
    return [(kind, phase) for kind in kinds for phase in kind.phases if phase.total > limit]


def warnings(config: RunConfig, models: Models, card: Card) -> list[str]:
    """Describe the phases that fit, but barely, with the keys to change; [] if none is."""
    return [
        f"{kind.name}, {phase.name}: {phase.total / GIB:.1f} GiB are more than {CROWDED:.0%} of a "
        f"{card.name}, and the plan is an estimate; {advice}"
        for kind, phase, advice in _advised(config, models, card, CROWDED)
        if phase.total <= card.memory_bytes
    ]


def main_memory_warnings(
    config: RunConfig,
    models: Models,
    card: Card,
    gpus_per_node: int,
    main_memory_gib: int | None = None,
) -> list[str]:
    """Describe the main memory of a trainer's node if it may not suffice; [] otherwise."""
    main_memory_gib = main_memory_gib or MAIN_MEMORY_GIB
    items = host_items(config, models, card, gpus_per_node)
    items["replayed experts"] = replayed_bytes(config, models.policy)
    total = sum(items.values()) / GIB
    if total <= CROWDED * main_memory_gib:
        return []
    largest = max(items, key=lambda name: items[name])
    return [
        f"main memory of a node: {total:,.0f} GiB are more than {CROWDED:.0%} of its "
        f"{main_memory_gib:,} GiB (--main-memory); {items[largest] / GIB:,.0f} are "
        f"{largest}: {_MAIN_MEMORY_ADVICE[largest]}"
    ]


_MAIN_MEMORY_ADVICE = {
    "offloaded by the trainer": "take less into trainer.offload or "
    "trainer.optimizer.cpu_offload_fraction, or raise trainer.data_parallel",
    "weights of sleeping engines": 'set weights.mode = "full", or raise rollout.tensor_parallel',
    "snapshot of a save": "raise trainer.data_parallel",
    "weights for engines that join or evaluate": "raise trainer.tensor_parallel or "
    "trainer.pipeline_parallel",
    "replayed experts": "lower sampling.prompts_per_step or rollout.max_response_tokens",
}
"""The keys to change for each part of the main memory that does not fit."""


def problems(config: RunConfig, models: Models, card: Card) -> list[str]:
    """Describe the phases that do not fit, with the keys to change; [] if all fit."""
    found = [
        f"{kind.name}, {phase.name}: {phase.total / GIB:.1f} GiB exceed a {card.name} by "
        f"{(phase.total - card.memory_bytes) / GIB:.1f} GiB; {advice}"
        for kind, phase, advice in _advised(config, models, card, 1.0)
    ]
    cache_tokens = engine_bytes(config, models.policy, card).cache_tokens
    longest = longest_sequence(config)
    if cache_tokens < longest:
        found.append(
            f"engine, rollout: the KV cache holds {cache_tokens:,} tokens, fewer than the "
            f"{longest:,} of one longest sequence; raise rollout.gpu_memory_utilization or "
            "rollout.tensor_parallel"
        )
    return found


def largest_share(config: RunConfig, models: Models, card: Card, share: float = CROWDED) -> float:
    """Return the largest rollout.gpu_memory_utilization with which no phase exceeds `share`.

    It is 0 or less if none does. Phases of the trainer alone do not count.
    """
    return min(
        _budget(config, phase, card, share)
        for kind in gpu_kinds(config, models, card)
        for phase in kind.phases
        if phase.name in WITH_BUDGET
    )


def _budget(config: RunConfig, phase: Phase, card: Card, share: float) -> float:
    """Return the gpu_memory_utilization with which a phase takes this share of the card."""
    budget = int(config.rollout.gpu_memory_utilization * card.memory_bytes)
    room = share * card.memory_bytes - (phase.total - budget)
    return int(100 * room / card.memory_bytes) / 100


def largest_sequence(config: RunConfig, models: Models, card: Card) -> tuple[int, str]:
    """Return the longest sequence that fits in training and in engines, and its limit.

    Returns:
        Tokens with the prompt (0 if no sequence fits), and the name of the limit.
    """
    cache = engine_bytes(config, models.policy, card).cache_tokens
    bounds = {
        "the KV cache of an engine": cache // STEP_TOKENS * STEP_TOKENS,
        "max_position_embeddings of the model": models.policy.max_positions,
    }
    bound = min(bounds, key=lambda name: bounds[name])
    low, high = 0, bounds[bound] // STEP_TOKENS
    if _fits(config, models, card, high * STEP_TOKENS):
        return bounds[bound], bound
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(config, models, card, middle * STEP_TOKENS):
            low = middle
        else:
            high = middle
    return low * STEP_TOKENS, "the trainer's memory"


def longest_on_one(config: RunConfig, models: Models, card: Card) -> int:
    """Return the longest sequence with which a recipe `ON_ONE` GPU trains; 0 if none fits."""
    share = max(0.0, largest_share(config, models, card))
    rollout = config.rollout.model_copy(update={"gpu_memory_utilization": share})
    own = config.model_copy(update={"rollout": rollout})
    longest, _ = largest_sequence(own, models, card)
    is_over = overflows(gpu_kinds(_with_length(own, longest), models, card), card)
    return 0 if is_over else longest


def _fits(config: RunConfig, models: Models, card: Card, num_tokens: int) -> bool:
    """Return whether a micro-batch of one sequence with `num_tokens` tokens fits."""
    over = overflows(gpu_kinds(_with_length(config, num_tokens), models, card), card)
    return not any(phase.name == "train" for _, phase in over)


def _with_length(config: RunConfig, num_tokens: int) -> RunConfig:
    """Return the recipe with this longest sequence, and one such sequence in a micro-batch."""
    response = max(1, num_tokens - config.data.max_prompt_tokens)
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"max_response_tokens": response}),
            "trainer": config.trainer.model_copy(update={"tokens_per_micro_batch": num_tokens}),
        }
    )


def _advised(
    config: RunConfig, models: Models, card: Card, share: float
) -> list[tuple[GpuKind, Phase, str]]:
    """Return the phases above this share of the card, with the key to change.

    Where one change helps several phases of a kind of GPU, only the fullest is returned.
    """
    found: dict[tuple[str, str], tuple[GpuKind, Phase, str]] = {}
    over = overflows(gpu_kinds(config, models, card), card, share)
    for kind, phase in sorted(over, key=lambda pair: pair[1].total, reverse=True):
        advice = _advice(config, models, card, kind, phase, share)
        found.setdefault((kind.name, advice), (kind, phase, advice))
    return list(found.values())


def _advice(
    config: RunConfig, models: Models, card: Card, kind: GpuKind, phase: Phase, share: float
) -> str:
    remedies = _remedies(config) if phase.name == "train" else _offloads(config)
    for changes in remedies:
        trainer = config.trainer.model_copy(update=changes)
        other = config.model_copy(update={"trainer": trainer})
        left = overflows(gpu_kinds(other, models, card), card, share)
        if not any((a.name, b.name) == (kind.name, phase.name) for a, b in left):
            return "set " + ", ".join(
                f"trainer.{key} = {toml_value(value)}" for key, value in changes.items()
            )
    if phase.name in WITH_BUDGET:
        fits = _budget(config, phase, card, share)
        if fits > 0.0:
            return f"lower rollout.gpu_memory_utilization to {fits:.2f}"
    return (
        "split the model further: raise trainer.tensor_parallel or trainer.pipeline_parallel, or "
        "trainer.data_parallel, which splits the optimizer"
    )


def _remedies(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield changes of the trainer that keep its ranks, the cheapest first."""
    trainer, longest = config.trainer, longest_sequence(config)
    changes: dict[str, Any] = {}
    if trainer.tokens_per_micro_batch > longest:
        changes["tokens_per_micro_batch"] = longest
        yield dict(changes)
    if trainer.tensor_parallel > 1 and not trainer.sequence_parallel:
        changes["sequence_parallel"] = True
        yield dict(changes)
    if not trainer.recompute:
        yield changes | {"recompute": ("mlp",)}
    if trainer.recompute != "full":
        yield changes | {"recompute": "full"}


def _offloads(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield tensors to offload between updates, the cheapest first."""
    offload = config.trainer.offload
    if config.cluster.placement == "separate":
        return
    cheapest_first: tuple[StateKind, ...] = ("gradients", "optimizer", "parameters")
    for kind in cheapest_first:
        if kind not in offload:
            offload = (*offload, kind)
            yield {"offload": offload}
