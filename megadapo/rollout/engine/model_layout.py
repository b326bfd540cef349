"""Which splits of an engine a model's sizes allow.

Importable without torch or vLLM, so that a dry run can answer at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from megadapo.errors import ConfigError
from megadapo.models.shape import ModelShape
from megadapo.rollout.config import RolloutConfig


def validate_engine_layout(shape: ModelShape, rollout: RolloutConfig) -> None:
    """Refuse a split of the engines that the model does not allow.

    Key-value heads are repeated where there are fewer than ranks; the vocabulary is padded.

    Raises:
        ConfigError: names every key that does not fit and what it does not fit.
    """
    problems = [
        *_tensor_problems(shape, rollout),
        *_stage_problems(shape, rollout),
        *_expert_problems(shape, rollout),
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _tensor_problems(shape: ModelShape, rollout: RolloutConfig) -> Iterator[str]:
    ranks = rollout.tensor_parallel
    sizes = {"num_attention_heads": shape.num_heads}
    if not shape.num_experts:
        sizes["intermediate_size"] = shape.ffn_size
    elif not rollout.expert_parallel:
        sizes["moe_intermediate_size"] = shape.expert_ffn_size
    for name, size in sizes.items():
        if size % ranks:
            yield _misfit("tensor_parallel", ranks, "divide", name, size)
    heads = shape.num_kv_heads
    if heads % ranks and ranks % heads:
        yield _misfit("tensor_parallel", ranks, "divide or repeat", "num_key_value_heads", heads)


def _stage_problems(shape: ModelShape, rollout: RolloutConfig) -> Iterator[str]:
    stages = rollout.pipeline_parallel
    if shape.num_layers < stages:
        yield _misfit(
            "pipeline_parallel", stages, "fit into", "num_hidden_layers", shape.num_layers
        )


def _expert_problems(shape: ModelShape, rollout: RolloutConfig) -> Iterator[str]:
    if not rollout.expert_parallel:
        return
    experts, ranks = shape.num_experts, rollout.tensor_parallel
    if not experts:
        yield "rollout.expert_parallel = true is for models with experts, and this one has none"
    elif experts % ranks:
        yield _misfit("tensor_parallel", ranks, "divide", "num_experts", experts)


def _misfit(key: str, value: int, what: str, name: str, size: int) -> str:
    return f"rollout.{key} = {value} does not {what} the model's {name} = {size}"
