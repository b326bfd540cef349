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
    ATTENTION_OUT_BIAS,
    DOWN,
    DOWN_BIAS,
    EMBEDDING,
    EXPERT_DOWN,
    EXPERT_GATE_UP,
    FINAL_NORM,
    GATE_UP,
    GATE_UP_BIAS,
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
    layer: tuple[Weight, ...]
    """Weights of one decoder layer."""
    attention_bias: bool | None = None
    """Whether q, k and v have a bias; None: config.json sets it (`attention_bias`)."""
    tied_by_default: bool = False
    """Value of `tie_word_embeddings` if config.json does not set it."""
    embedding: Weight = EMBEDDING
    final_norm: Weight = FINAL_NORM
    head: Weight = HEAD

    @property
    def has_qk_norm(self) -> bool:
        """Whether each head's q and k are normalised."""
        return Q_NORM in self.layer

    def has_optional(self, flag: str) -> bool:
        """Return whether some weight exists only if the configuration sets `flag`."""
        return any(row.only_if == flag for row in self.layer)


_PLAIN_MLP = (MLP_NORM, GATE_UP, DOWN)
_QWEN3_ATTENTION = (INPUT_NORM, QKV, QKV_BIAS, Q_NORM, K_NORM, ATTENTION_OUT, ATTENTION_OUT_BIAS)

# Qwen2 and Qwen2.5: a bias on q, k and v only
QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    layer=(INPUT_NORM, QKV, QKV_BIAS, ATTENTION_OUT, *_PLAIN_MLP),
    attention_bias=True,
)
# a norm on each head's q and k; config.json sets the attention bias
QWEN3 = Family(architecture="Qwen3ForCausalLM", layer=(*_QWEN3_ATTENTION, *_PLAIN_MLP))
# a router and experts in every layer. MLP_NORM's alias is unused: there is no linear_fc1 beside
# the norm that Transformer Engine could fuse with it
QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    layer=(*_QWEN3_ATTENTION, MLP_NORM, ROUTER, EXPERT_GATE_UP, EXPERT_DOWN),
)
# Llama 3: config.json sets the attention and MLP biases; the published models have none
LLAMA = Family(
    architecture="LlamaForCausalLM",
    layer=(
        *(INPUT_NORM, QKV, QKV_BIAS, ATTENTION_OUT, ATTENTION_OUT_BIAS),
        *(MLP_NORM, GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS),
    ),
)
# no bias
MISTRAL = Family(
    architecture="MistralForCausalLM",
    layer=(INPUT_NORM, QKV, ATTENTION_OUT, *_PLAIN_MLP),
    attention_bias=False,
)

FAMILIES: dict[str, Family] = {
    family.architecture: family for family in (QWEN2, QWEN3, QWEN3_MOE, LLAMA, MISTRAL)
}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """Return the family of a Hugging Face configuration; raise WeightError if it is unknown."""
    architectures = hf_config.get("architectures") or []
    for architecture in architectures:
        if architecture in FAMILIES:
            return FAMILIES[architecture]
    raise WeightError(
        f"config.json: architectures={architectures} is not supported; megadapo supports "
        f"{', '.join(FAMILIES)}."
    )
