"""What two Hugging Face configurations must agree on to describe the same model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megadapo.models.families.registry import family_of
from megadapo.models.rope import rope_settings

_COMPARED = {
    "architectures": None,
    "hidden_size": None,
    "intermediate_size": None,
    "num_hidden_layers": None,
    "num_attention_heads": None,
    "vocab_size": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "mlp_bias": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "moe_intermediate_size": None,
    "num_experts_per_tok": None,
    "norm_topk_prob": None,
}
"""Keys that decide what a model computes, with the value that a missing key stands for."""


def comparable(hf_config: Mapping[str, Any]) -> dict[str, object]:
    """The keys that decide what a model computes, old and new spellings made one."""
    values = {key: hf_config.get(key, default) for key, default in _COMPARED.items()}
    family = family_of(hf_config)
    heads = hf_config.get("num_attention_heads")
    values["num_key_value_heads"] = hf_config.get("num_key_value_heads") or heads
    head_dim = hf_config.get("head_dim")
    if head_dim is None and heads:
        head_dim = hf_config.get("hidden_size", 0) // heads
    values["head_dim"] = head_dim
    values["num_experts"] = hf_config.get("num_experts", hf_config.get("num_local_experts"))
    values["tie_word_embeddings"] = hf_config.get("tie_word_embeddings", family.tied_by_default)
    bias = family.attention_bias
    values["attention_bias"] = hf_config.get("attention_bias", False) if bias is None else bias
    return values | {f"rope.{key}": value for key, value in rope_settings(hf_config).items()}


def config_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """One sentence part per key on which two configurations differ."""
    left, right = comparable(a), comparable(b)
    return [
        f"{key} is {left.get(key)!r} against {right.get(key)!r}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key)
    ]
