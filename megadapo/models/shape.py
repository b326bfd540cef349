"""The sizes of a model that decide the shape of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megadapo.errors import WeightError
from megadapo.models.families import family_of

CONFIG_KEYS = {
    "hidden": "hidden_size",
    "vocab": "vocab_size",
    "q": "num_attention_heads x head_dim",
    "kv": "num_key_value_heads x head_dim",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "experts": "num_experts",
    "expert_ffn": "moe_intermediate_size",
    "values": "num_labels",
}
"""Hugging Face configuration key of each size symbol of the family tables, for errors."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes that decide which weights a model has and how large they are."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tied: bool
    num_experts: int = 0
    expert_ffn_size: int = 0

    def size(self, symbol: str) -> int:
        """Return the length of an axis by its symbol in the family tables."""
        return {
            "hidden": self.hidden_size,
            "vocab": self.vocab_size,
            "q": self.num_heads * self.head_dim,
            "kv": self.num_kv_heads * self.head_dim,
            "head_dim": self.head_dim,
            "ffn": self.ffn_size,
            "experts": self.num_experts,
            "expert_ffn": self.expert_ffn_size,
            "values": 1,
        }[symbol]


def model_shape(hf_config: Mapping[str, Any]) -> ModelShape:
    """Read the shape of a model from its Hugging Face configuration.

    Raise WeightError that names a key that is missing or has a value that is not supported.
    """
    family = family_of(hf_config)
    num_heads = required_size(hf_config, "num_attention_heads")
    hidden_size = required_size(hf_config, "hidden_size")
    given = {key: value for key, value in hf_config.items() if value is not None}
    sizes = {"num_key_value_heads": num_heads, "head_dim": hidden_size // num_heads, **given}
    is_moe = any(row.expert for row in family.layer)
    if is_moe and (
        hf_config.get("mlp_only_layers") or hf_config.get("decoder_sparse_step", 1) != 1
    ):
        raise WeightError(
            "config.json: mlp_only_layers and decoder_sparse_step ask for dense layers between "
            "the expert layers; megadapo supports experts in every layer only."
        )
    experts_key = "num_experts" if "num_experts" in hf_config else "num_local_experts"
    return ModelShape(
        num_layers=required_size(hf_config, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=required_size(sizes, "num_key_value_heads"),
        head_dim=required_size(sizes, "head_dim"),
        ffn_size=required_size(hf_config, "intermediate_size"),
        vocab_size=required_size(hf_config, "vocab_size"),
        tied=bool(hf_config.get("tie_word_embeddings", False)),
        num_experts=required_size(hf_config, experts_key) if is_moe else 0,
        expert_ffn_size=required_size(hf_config, "moe_intermediate_size") if is_moe else 0,
    )


def required_size(hf_config: Mapping[str, Any], key: str) -> int:
    """Return a positive integer of the configuration; raise WeightError if it is not one."""
    value = hf_config.get(key)
    if type(value) is not int or value < 1:
        raise WeightError(f"config.json: {key} must be a positive integer, but it is {value!r}.")
    return value
