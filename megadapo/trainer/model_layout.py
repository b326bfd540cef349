"""Which models the trainer knows, and which splits their sizes allow.

Importable without torch or Megatron, so that a dry run can answer at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megadapo.errors import ConfigError
from megadapo.trainer.config import TrainerConfig
from megadapo.trainer.stages import divisors, stage_problems

ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral")
"""`model_type` of the models that the trainer can build."""
ROPE_TYPES = ("default", "linear", "llama3")
"""Rotary scalings that the trainer knows."""


def validate_model_layout(hf_config: Mapping[str, Any], trainer: TrainerConfig) -> None:
    """Refuse a model the trainer does not know, or a split that its sizes do not allow.

    The vocabulary is padded and always divides.

    Raises:
        ConfigError: names every key that does not fit and the sizes that would.
    """
    if "model_type" in hf_config:
        validate_architecture(hf_config)
    num_heads = _size(hf_config, "num_attention_heads")
    split_by_tensor = {
        "num_attention_heads": num_heads,
        "num_key_value_heads": hf_config.get("num_key_value_heads") or num_heads,
        "intermediate_size": _size(hf_config, "intermediate_size"),
    }
    problems = [
        f"trainer.tensor_parallel = {trainer.tensor_parallel} does not divide the model's "
        f"{name} = {size}; sizes that fit this model: "
        f"{divisors(math.gcd(*split_by_tensor.values()))}"
        for name, size in split_by_tensor.items()
        if size % trainer.tensor_parallel
    ]
    problems += stage_problems(_size(hf_config, "num_hidden_layers"), trainer)
    if problems:
        raise ConfigError("\n".join(problems))


def validate_architecture(hf_config: Mapping[str, Any]) -> None:
    """Refuse a model, or an option of one, that the trainer would compute wrongly.

    Raises:
        ConfigError: names the key of its config.json.
    """
    kind = hf_config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ConfigError(
            f"model.path: model_type {kind!r} is not supported; known are "
            f"{', '.join(ARCHITECTURES)}"
        )
    if hf_config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"model.path: hidden_act {hf_config['hidden_act']!r} is not supported")
    for name in ("attention_bias", "mlp_bias"):
        if kind != "qwen2" and hf_config.get(name):
            raise ConfigError(f"model.path: {name} is not supported for {kind}")
    # Qwen2 files carry a window that use_sliding_window = false turns off
    if hf_config.get("sliding_window") and hf_config.get("use_sliding_window", True):
        raise ConfigError("model.path: attention with a sliding_window is not supported")
    rope_parameters(hf_config)


def rope_parameters(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters; transformers 5 keeps them in one table, older files in several keys.

    Raises:
        ConfigError: the scaling is not one of `ROPE_TYPES`.
    """
    table = dict(hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {})
    table.setdefault("rope_theta", hf_config.get("rope_theta", 10000.0))
    table["rope_type"] = table.get("rope_type", table.get("type", "default"))
    if table["rope_type"] not in ROPE_TYPES:
        raise ConfigError(
            f"model.path: rotary scaling {table['rope_type']!r} is not supported; known are "
            f"{', '.join(ROPE_TYPES)}"
        )
    return table


def _size(hf_config: Mapping[str, Any], name: str) -> int:
    value = hf_config.get(name)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"model.path: its config.json has no usable {name} (found {value!r})")
    return value
