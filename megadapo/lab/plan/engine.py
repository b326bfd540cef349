"""What one rank of a rollout engine takes: weights, cache, and what vLLM measures at its start."""

from __future__ import annotations

from dataclasses import dataclass

from megadapo.lab.plan.cards import GRAPH_BYTES, Card
from megadapo.lab.plan.ranks import engine_parameters
from megadapo.models.description import ModelDescription
from megadapo.rollout.config import RolloutConfig
from megadapo.weights.layout.layout import ModelLayout
from megadapo.weights.layout.shards import EnginePosition

SCALED_WEIGHTS, SCALE_BYTES = 128 * 128, 4
"""Of a quantised matrix."""
LOGIT_BYTES = 14
"""Of a token of the vocabulary for each response: bf16 and fp32 logits, log-probs, their noise."""


@dataclass(frozen=True, kw_only=True)
class EngineBytes:
    """The largest rank of an engine while it generates; all of it is vLLM's budget."""

    weights: int
    workspace: int
    """Activations of the largest step, logits of all responses, and CUDA graphs."""
    cache: int
    """What is left of the budget; negative where nothing is."""
    token: int
    """Cache of one token."""

    @property
    def budget(self) -> int:
        return self.weights + self.workspace + self.cache

    @property
    def cache_tokens(self) -> int:
        """Tokens that the cache holds, those of prompts included."""
        return max(0, self.cache // self.token)


def mlp_width(model: ModelDescription) -> int:
    """Columns between the matrices of a layer's MLP, or of the experts of one token."""
    if model.routing is None:
        return model.shape.ffn_size
    return model.routing.experts_per_token * model.shape.expert_ffn_size


def engine_bytes(
    model: ModelDescription, rollout: RolloutConfig, card: Card, *, itemsize: int
) -> EngineBytes:
    """An engine rank's share of a card."""
    shape, tp = model.shape, rollout.tensor_parallel
    layout = ModelLayout(model.family, shape)
    positions = tuple(
        EnginePosition(
            tp_size=tp,
            pp_rank=stage,
            pp_size=rollout.pipeline_parallel,
            expert_parallel=rollout.expert_parallel,
        )
        for stage in range(rollout.pipeline_parallel)
    )
    num_parameters, num_linear = engine_parameters(layout, positions)
    weights = num_parameters * itemsize
    if rollout.quantization == "fp8":
        weights -= num_linear * (itemsize - 1) - num_linear * SCALE_BYTES // SCALED_WEIGHTS
    activation = 3 * mlp_width(model) // tp + 4 * shape.hidden_size
    workspace = rollout.max_num_batched_tokens * activation * itemsize
    workspace += rollout.max_num_seqs * shape.vocab_size * LOGIT_BYTES
    workspace += 0 if rollout.enforce_eager else GRAPH_BYTES
    num_layers = max(len(layout.engine_layers(position)) for position in positions)
    kv_heads = max(1, shape.num_kv_heads // tp)
    return EngineBytes(
        weights=weights,
        workspace=workspace,
        cache=int(rollout.gpu_memory_utilization * card.memory_bytes) - weights - workspace,
        token=2 * num_layers * kv_heads * shape.head_dim * itemsize,
    )
