"""Which splits of an engine a model's sizes allow.

Importable without torch or vLLM, so that a dry run can answer at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megadapo.errors import ConfigError
from megadapo.rollout.config import RolloutConfig

CUT_BY_TENSOR = ("num_attention_heads", "intermediate_size")
CUT_BY_TENSOR_EXPERTS = ("num_attention_heads", "moe_intermediate_size")


def validate_engine_layout(hf_config: Mapping[str, Any], rollout: RolloutConfig) -> None:
    """Refuse a split of the engines that the model does not allow.

    Key-value heads are repeated where there are fewer than ranks; the vocabulary is padded.

    Raises:
        ConfigError: names every key that does not fit and what it does not fit.
    """
    problems = [*_tensor_problems(hf_config, rollout), *_stage_problems(hf_config, rollout)]
    problems += _expert_problems(hf_config, rollout)
    if problems:
        raise ConfigError("\n".join(problems))


def num_experts(hf_config: Mapping[str, Any]) -> int:
    """Experts of a layer; 0 in a dense model."""
    return hf_config.get("num_experts") or hf_config.get("num_local_experts") or 0


def _tensor_problems(hf_config: Mapping[str, Any], rollout: RolloutConfig) -> Iterator[str]:
    ranks = rollout.tensor_parallel
    names = CUT_BY_TENSOR_EXPERTS if num_experts(hf_config) else CUT_BY_TENSOR
    for name in names:
        whole = name == "moe_intermediate_size" and rollout.expert_parallel
        size = hf_config.get(name)
        if isinstance(size, int) and size % ranks and not whole:
            yield _misfit("tensor_parallel", ranks, "divide", name, size)
    heads = hf_config.get("num_key_value_heads")
    if isinstance(heads, int) and heads % ranks and ranks % heads:
        yield _misfit("tensor_parallel", ranks, "divide or repeat", "num_key_value_heads", heads)


def _stage_problems(hf_config: Mapping[str, Any], rollout: RolloutConfig) -> Iterator[str]:
    layers = hf_config.get("num_hidden_layers")
    if isinstance(layers, int) and layers < rollout.pipeline_parallel:
        stages = rollout.pipeline_parallel
        yield _misfit("pipeline_parallel", stages, "fit into", "num_hidden_layers", layers)


def _expert_problems(hf_config: Mapping[str, Any], rollout: RolloutConfig) -> Iterator[str]:
    if not rollout.expert_parallel:
        return
    experts, ranks = num_experts(hf_config), rollout.tensor_parallel
    if not experts:
        yield "rollout.expert_parallel = true is for models with experts, and this one has none"
    elif experts % ranks:
        yield _misfit("tensor_parallel", ranks, "divide", "num_experts", experts)


def _misfit(key: str, value: int, what: str, name: str, size: int) -> str:
    return f"rollout.{key} = {value} does not {what} the model's {name} = {size}"
