"""The sizes and flags of a model that decide the shape of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megadapo.errors import WeightError
from megadapo.models.families.registry import Family, family_of

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
"""What a size symbol of the family tables is called in a Hugging Face configuration."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What of a Hugging Face configuration decides which weights exist and how large they are."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    num_experts: int = 0
    expert_ffn_size: int = 0

    def size(self, symbol: str) -> int:
        """Length of an axis by the symbol that the family tables use."""
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
    """Read the shape of a model out of its Hugging Face configuration.

    Raises WeightError that names the key where one is missing or not supported.
    """
    family = family_of(hf_config)
    num_heads = required_size(hf_config, "num_attention_heads")
    hidden_size = required_size(hf_config, "hidden_size")
    is_moe = any(row.expert for row in family.layer)
    if is_moe:
        _refuse_dense_layers(hf_config)
    return ModelShape(
        num_layers=required_size(hf_config, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=hf_config.get("num_key_value_heads") or num_heads,
        head_dim=hf_config.get("head_dim") or hidden_size // num_heads,
        ffn_size=required_size(hf_config, "intermediate_size"),
        vocab_size=required_size(hf_config, "vocab_size"),
        tied=bool(hf_config.get("tie_word_embeddings", family.tied_by_default)),
        attention_bias=_attention_bias(hf_config, family),
        mlp_bias=bool(hf_config.get("mlp_bias", False)),
        num_experts=_num_experts(hf_config) if is_moe else 0,
        expert_ffn_size=required_size(hf_config, "moe_intermediate_size") if is_moe else 0,
    )


def required_size(hf_config: Mapping[str, Any], key: str) -> int:
    """A positive integer of the configuration, or a WeightError that names the key."""
    value = hf_config.get(key)
    if not isinstance(value, int) or value < 1:
        raise WeightError(f"config.json: {key} must be a positive integer, but it is {value!r}.")
    return value


def _attention_bias(hf_config: Mapping[str, Any], family: Family) -> bool:
    if family.attention_bias is None:
        return bool(hf_config.get("attention_bias", False))
    return family.attention_bias


def _num_experts(hf_config: Mapping[str, Any]) -> int:
    key = "num_experts" if "num_experts" in hf_config else "num_local_experts"
    return required_size(hf_config, key)


def _refuse_dense_layers(hf_config: Mapping[str, Any]) -> None:
    if hf_config.get("mlp_only_layers") or hf_config.get("decoder_sparse_step", 1) != 1:
        raise WeightError(
            "config.json: mlp_only_layers and decoder_sparse_step ask for dense layers between "
            "the expert layers; megadapo supports experts in every layer only."
        )
