"""Step time by a roofline, with explicit assumptions about shares and lengths."""

from __future__ import annotations

from collections.abc import Sequence

from megadapo.config import RunConfig
from megadapo.lab.plan.cards import Card
from megadapo.lab.plan.phases import itemsize_of
from megadapo.lab.plan.ranks import engine_bytes, mlp_width
from megadapo.lab.plan.refit import LINK_SHARE, Refit
from megadapo.models.description import ModelDescription
from megadapo.trainer.config import TrainerConfig

TRAIN_SHARE = 0.40
"""Share of a card's dense bf16 FLOP/s that a trainer reaches over a step."""
READ_SHARE = 0.70
"""Share of a card's memory bandwidth that an engine's step reaches."""
MEAN_SHARE = 0.25
"""Mean response length over the limit: about 5,000 of 20,480 tokens in published runs."""
PROMPT_TOKENS = 200
"""Tokens of a mean prompt."""
KEPT_SHARE = 0.35
"""Share of mixed groups, if only those are kept."""
BACKWARD_PASSES = 2.0
"""Cost of a backward pass in forward passes."""


def describe_times(
    config: RunConfig, model: ModelDescription, card: Card, refit: Refit
) -> list[str]:
    """Describe the seconds of a step and their assumptions, one line each.

    Engines are limited by bandwidth, the trainer by FLOP/s. Waits between processes are left out.
    `split.describe_split` has the steps of modes that sample beside the trainer.
    """
    generation, longest = _rollout_seconds(config, model, card)
    limit = "by throughput"
    if generation < longest:
        limit = "by the longest response, which more engines do not shorten"
    rollout, train = max(generation, longest), train_seconds(config, model, card)
    sync = sum(refit.seconds(card).values())
    return [
        f"a step at this roofline: {rollout + train + sync:,.0f} s = rollout "
        f"{rollout:,.0f} ({limit}) + train {train:,.0f} + sync {sync:.2f}",
        f"  {READ_SHARE:.0%} of {card.memory_bandwidth / 1e12:.2f} TB/s while engines sample, "
        f"{TRAIN_SHARE:.0%} of {card.flops / 1e12:.0f} TFLOP/s while the trainer works, "
        f"{LINK_SHARE:.0%} of {card.link_bandwidth / 1e9:.0f} and "
        f"{card.network_bandwidth / 1e9:.0f} GB/s per link;",
        f"  {describe_responses(config)}; waits between processes are not counted",
    ]


def describe_responses(config: RunConfig) -> str:
    """Describe the assumed responses of a step."""
    mixed = f", {KEPT_SHARE:.0%} of the groups mixed"
    kept = mixed if config.sampling.selection == "signal" else ""
    return f"responses of {mean_response(config):,.0f} tokens on average{kept}"


def mean_response(config: RunConfig) -> float:
    """Return the tokens of a mean response."""
    return MEAN_SHARE * config.rollout.max_response_tokens


def mean_context(config: RunConfig) -> float:
    """Return the mean number of tokens in context while a mean response is generated."""
    return PROMPT_TOKENS + mean_response(config) / 2


def update_flops(
    model: ModelDescription, lengths: Sequence[int], *, with_logprobs: bool = True
) -> float:
    """Return the FLOPs of old log-probs and one update of these sequences, without recomputation.

    The model FLOPs utilization counts the same.

    Args:
        with_logprobs: whether the old log-probs take a pass of their own.
    """
    passes = 1 + with_logprobs + BACKWARD_PASSES
    return sum(passes * length * forward_flops(model, length) for length in lengths)


def num_responses(config: RunConfig) -> float:
    """Return the number of responses that engines generate for a step."""
    sampling = config.sampling
    kept = KEPT_SHARE if sampling.selection == "signal" else 1.0
    return sampling.prompts_per_step * sampling.responses_per_prompt / kept


def _rollout_seconds(config: RunConfig, model: ModelDescription, card: Card) -> tuple[float, float]:
    rollout = config.rollout
    itemsize = itemsize_of(config)
    engine = engine_bytes(model, rollout, card, itemsize=itemsize)
    per_engine = num_responses(config) / rollout.num_engines
    mean = mean_response(config)
    context = mean_context(config)
    at_once = max(1.0, min(rollout.max_num_seqs, per_engine, engine.cache_tokens / context))
    bandwidth = READ_SHARE * card.memory_bandwidth
    read = (engine.weights + at_once * context * engine.token) / bandwidth
    flops = forward_flops(model, 2 * context) / rollout.ranks_per_engine * at_once
    products = flops / (TRAIN_SHARE * card.flops)
    # each token passes through the stages of an engine in sequence
    alone = engine.weights / bandwidth * rollout.pipeline_parallel
    return (
        per_engine * mean / at_once * max(read, products),
        rollout.max_response_tokens * alone,
    )


def train_seconds(config: RunConfig, model: ModelDescription, card: Card) -> float:
    """Return the seconds in which the recipe's trainer works on a step's batch."""
    trainer, sampling = config.trainer, config.sampling
    num_sequences = sampling.prompts_per_step * sampling.responses_per_prompt
    length = PROMPT_TOKENS + mean_response(config)
    layer, mlp = _layer_flops(model, length)
    forward = forward_flops(model, length)
    again = model.shape.num_layers * _recomputed(trainer, layer=layer, mlp=mlp)
    # old log-probs, then a forward and backward pass for each pass over the batch
    algorithm = config.algorithm
    is_one_update = num_sequences <= algorithm.responses_per_mini_batch
    is_shared = is_one_update and not (algorithm.reads_old_policy or model.shape.num_experts)
    update = (1 + BACKWARD_PASSES) * forward + again
    flops = num_sequences * length * (forward * (not is_shared) + algorithm.passes * update)
    seconds = flops / (trainer.num_ranks * TRAIN_SHARE * card.flops)
    return seconds / (1.0 - _bubble(config, length))


def forward_flops(model: ModelDescription, length: float) -> float:
    """Return a token's mean FLOPs in a sequence of `length` tokens."""
    layer, _ = _layer_flops(model, length)
    return model.shape.num_layers * layer + 2.0 * model.shape.hidden_size * model.shape.vocab_size


def _layer_flops(model: ModelDescription, length: float) -> tuple[float, float]:
    """Return a token's forward FLOPs in one layer: in total, and in the MLP."""
    shape = model.shape
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    mlp = 6.0 * shape.hidden_size * mlp_width(model)
    projections = 2.0 * shape.hidden_size * (2 * query + 2 * key)
    # a token attends to half of its sequence on average: scores and weighted sum
    return projections + 4.0 * query * length / 2 + mlp, mlp


def _recomputed(trainer: TrainerConfig, *, layer: float, mlp: float) -> float:
    if trainer.recompute == "full":
        return layer
    return mlp if "mlp" in trainer.recompute else 0.0


def _bubble(config: RunConfig, length: float) -> float:
    """Return the share of an update in which a stage waits for the pipeline to fill and drain."""
    trainer = config.trainer
    waiting = (trainer.pipeline_parallel - 1) / trainer.virtual_pipeline
    sequences = config.algorithm.responses_per_mini_batch / trainer.data_parallel
    num_micro_batches = max(1.0, sequences * length / trainer.tokens_per_micro_batch)
    return waiting / (num_micro_batches + waiting)
