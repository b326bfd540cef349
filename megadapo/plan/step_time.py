"""Seconds of the trainer's work on a step, and its FLOPs."""

from __future__ import annotations

from collections.abc import Sequence

from megadapo.algorithm.objective import TOKEN_GATES
from megadapo.config import RunConfig
from megadapo.models.description import ModelDescription
from megadapo.plan.cards import Card
from megadapo.plan.ranks import mlp_width
from megadapo.plan.responses import Responses

TRAIN_SHARE = 0.35
"""Share of a card's dense bf16 FLOP/s that a trainer reaches over a step."""
EXPERT_TRAIN_SHARE = 0.055
"""The same for a model with experts, whose products are small."""
BACKWARD_PASSES = 2.0
"""Cost of a backward pass in forward passes."""


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


def train_seconds(
    config: RunConfig, model: ModelDescription, card: Card, responses: Responses
) -> float:
    """Return the seconds in which the recipe's trainer works on a step's batch."""
    trainer, sampling, algorithm = config.trainer, config.sampling, config.algorithm
    num_sequences = sampling.prompts_per_step * sampling.responses_per_prompt
    layer, mlp = _layer_flops(model, responses.token_sequence)
    forward = forward_flops(model, responses.token_sequence)
    again = layer if trainer.recompute == "full" else mlp * ("mlp" in trainer.recompute)
    update = (1 + BACKWARD_PASSES) * forward + model.shape.num_layers * again
    # old and reference log-probs, then a forward and backward pass for each pass over the batch
    is_one_update = num_sequences <= algorithm.responses_per_mini_batch
    is_shared = is_one_update and not (algorithm.reads_old_policy or model.shape.num_experts)
    num_forwards = float(not is_shared) + (algorithm.objective.kl_coef != 0.0)
    if algorithm.objective.gate in TOKEN_GATES:
        # a pass before each update but the first, which knows its ratios
        num_forwards += algorithm.passes - algorithm.responses_per_mini_batch / num_sequences
    flops = num_forwards * forward + algorithm.passes * update
    share = EXPERT_TRAIN_SHARE if model.shape.num_experts else TRAIN_SHARE
    seconds = num_sequences * responses.mean_sequence * flops / (share * card.flops)
    return seconds / trainer.num_ranks / (1.0 - _bubble(config, responses.mean_sequence))


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


def _bubble(config: RunConfig, length: float) -> float:
    """Return the share of an update in which a stage waits for the pipeline to fill and drain."""
    trainer = config.trainer
    waiting = (trainer.pipeline_parallel - 1) / trainer.virtual_pipeline
    sequences = config.algorithm.responses_per_mini_batch / trainer.data_parallel
    num_micro_batches = max(1.0, sequences * length / trainer.tokens_per_micro_batch)
    return waiting / (num_micro_batches + waiting)
