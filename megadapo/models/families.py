"""Model families: the weights of a decoder layer and the defaults of the family's config.json.

To add a dense family, add a table here and list it in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megadapo.errors import WeightError
from megadapo.models.rows import (
    ATTENTION_OUT,
    DOWN,
    EMBEDDING,
    EXPERT_DOWN,
    EXPERT_GATE_UP,
    FINAL_NORM,
    GATE_UP,
    HEAD,
    INPUT_NORM,
    K_NORM,
    MLP_NORM,
    Q_NORM,
    QKV,
    QKV_BIAS,
    ROUTER,
    Weight,
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family: every weight it has, in the order Hugging Face lists them."""

    architecture: str
    """Name in `architectures` of the Hugging Face configuration."""
    model_type: str
    layer: tuple[Weight, ...]
    keys: tuple[str, ...] = ()
    """Keys of config.json that this family reads beside those of `models/keys.py`."""
    window_needs_flag: bool = True
    """Whether `sliding_window` has an effect only with `use_sliding_window`."""
    default_window: int | None = None
    """Value of `sliding_window` if config.json does not set it."""
    embedding: Weight = EMBEDDING
    final_norm: Weight = FINAL_NORM
    head: Weight = HEAD

    @property
    def has_qkv_bias(self) -> bool:
        """Whether q, k and v have a bias."""
        return QKV_BIAS in self.layer

    @property
    def has_qk_norm(self) -> bool:
        """Whether each head's q and k are normalised."""
        return Q_NORM in self.layer


_PLAIN_MLP = (MLP_NORM, GATE_UP, DOWN)
_QWEN3_ATTENTION = (INPUT_NORM, QKV, Q_NORM, K_NORM, ATTENTION_OUT)

# Qwen2 and Qwen2.5: a bias on q, k and v only
QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    layer=(INPUT_NORM, QKV, QKV_BIAS, ATTENTION_OUT, *_PLAIN_MLP),
)
# a norm on each head's q and k
QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    layer=(*_QWEN3_ATTENTION, *_PLAIN_MLP),
)
# a router and experts in every layer. MLP_NORM's alias is unused: there is no linear_fc1 beside
# the norm that Transformer Engine could fuse with it
QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    layer=(*_QWEN3_ATTENTION, MLP_NORM, ROUTER, EXPERT_GATE_UP, EXPERT_DOWN),
    keys=(
        *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
        *("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"),
    ),
)
# Llama 3
LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    layer=(INPUT_NORM, QKV, ATTENTION_OUT, *_PLAIN_MLP),
    window_needs_flag=False,
)
# a configuration without sliding_window has transformers' window
MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    layer=(INPUT_NORM, QKV, ATTENTION_OUT, *_PLAIN_MLP),
    window_needs_flag=False,
    default_window=4096,
)

FAMILIES: dict[str, Family] = {
    family.architecture: family for family in (QWEN2, QWEN3, QWEN3_MOE, LLAMA, MISTRAL)
}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """Return the family of a Hugging Face configuration; raise WeightError if it is unknown."""
    for architecture in architectures(hf_config):
        if architecture in FAMILIES:
            return FAMILIES[architecture]
    raise WeightError(
        f"config.json: architectures={hf_config.get('architectures')} is not supported; megadapo "
        f"supports {', '.join(FAMILIES)}."
    )


def architectures(hf_config: Mapping[str, Any]) -> list[str]:
    """Return the names of transformers' classes for a model; raise WeightError for other values."""
    names = hf_config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise WeightError(f"config.json: architectures must be a list of names, not {names!r:.80}")
    return [*names]
