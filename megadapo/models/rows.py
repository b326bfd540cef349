"""Rows of the family tables: one weight each, with its names, sizes and tensor-parallel split.

A row has the weight's names in Megatron, Hugging Face and vLLM, the sizes of its Hugging Face
tensors, and its split. Sizes are symbols, which `ModelShape.size` resolves.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace


class TensorSplit(enum.Enum):
    """Tensor-parallel split of a weight, in Megatron and in vLLM."""

    REPLICATED = enum.auto()
    """Whole on every rank."""
    COLUMNS = enum.auto()
    """Input features (axis 1) in equal parts."""
    QKV = enum.auto()
    """Megatron: interleaved by query group, then equal parts. vLLM: q, k, v parts; KV repeated."""
    GATE_UP = enum.auto()
    """Both: the rank's part of gate, then its part of up."""
    VOCAB = enum.auto()
    """Rows padded with zeros to a multiple that each system chooses, then equal parts."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter of the trainer and of the engine, made of one or more Hugging Face tensors."""

    megatron: str
    """Name in Megatron, below `decoder.layers.N.` for a layer's weight."""
    hf: tuple[str, ...]
    """Hugging Face names, below `model.layers.N.` for a layer's weight, in fusion order."""
    vllm: str
    """Name in vLLM, below `model.layers.N.` for a layer's weight."""
    row_sizes: tuple[str, ...]
    """Symbol of the number of rows (axis 0) of each Hugging Face tensor."""
    column_size: str | None = None
    """Symbol of the number of columns (axis 1); None for a vector."""
    split: TensorSplit = TensorSplit.REPLICATED
    expert: bool = False
    """Whether each expert has one. `{e}` in a name is the expert's number, local in Megatron and
    global in Hugging Face; vLLM stacks a rank's experts along a leading axis."""
    megatron_alias: str | None = None
    """Name in Megatron with Transformer Engine's fused layers."""


def norm(megatron: str, hf: str, *, alias: str | None = None, size: str = "hidden") -> Weight:
    """Return the row of a norm's weight: replicated, with the same name in vLLM."""
    return Weight(megatron=megatron, hf=(hf,), vllm=hf, row_sizes=(size,), megatron_alias=alias)


EMBEDDING = Weight(
    megatron="embedding.word_embeddings.weight",
    hf=("model.embed_tokens.weight",),
    vllm="model.embed_tokens.weight",
    row_sizes=("vocab",),
    column_size="hidden",
    split=TensorSplit.VOCAB,
)
FINAL_NORM = norm("decoder.final_layernorm.weight", "model.norm.weight")
HEAD = Weight(
    megatron="output_layer.weight",
    hf=("lm_head.weight",),
    vllm="lm_head.weight",
    row_sizes=("vocab",),
    column_size="hidden",
    split=TensorSplit.VOCAB,
)
VALUE_HEAD = Weight(
    megatron="output_layer.weight",
    hf=("score.weight",),
    vllm="score.weight",
    row_sizes=("values",),
    column_size="hidden",
)

INPUT_NORM = norm(
    "input_layernorm.weight",
    "input_layernorm.weight",
    alias="self_attention.linear_qkv.layer_norm_weight",
)
QKV = Weight(
    megatron="self_attention.linear_qkv.weight",
    hf=("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    vllm="self_attn.qkv_proj.weight",
    row_sizes=("q", "kv", "kv"),
    column_size="hidden",
    split=TensorSplit.QKV,
)
QKV_BIAS = replace(
    QKV,
    megatron="self_attention.linear_qkv.bias",
    hf=("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    vllm="self_attn.qkv_proj.bias",
    column_size=None,
)
Q_NORM = norm("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", size="head_dim")
K_NORM = norm("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", size="head_dim")
ATTENTION_OUT = Weight(
    megatron="self_attention.linear_proj.weight",
    hf=("self_attn.o_proj.weight",),
    vllm="self_attn.o_proj.weight",
    row_sizes=("hidden",),
    column_size="q",
    split=TensorSplit.COLUMNS,
)

MLP_NORM = norm(
    "pre_mlp_layernorm.weight",
    "post_attention_layernorm.weight",
    alias="mlp.linear_fc1.layer_norm_weight",
)
GATE_UP = Weight(
    megatron="mlp.linear_fc1.weight",
    hf=("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    vllm="mlp.gate_up_proj.weight",
    row_sizes=("ffn", "ffn"),
    column_size="hidden",
    split=TensorSplit.GATE_UP,
)
DOWN = Weight(
    megatron="mlp.linear_fc2.weight",
    hf=("mlp.down_proj.weight",),
    vllm="mlp.down_proj.weight",
    row_sizes=("hidden",),
    column_size="ffn",
    split=TensorSplit.COLUMNS,
)

ROUTER = Weight(
    megatron="mlp.router.weight",
    hf=("mlp.gate.weight",),
    vllm="mlp.gate.weight",
    row_sizes=("experts",),
    column_size="hidden",
)
EXPERT_GATE_UP = Weight(
    megatron="mlp.experts.local_experts.{e}.linear_fc1.weight",
    megatron_alias="mlp.experts.linear_fc1.weight{e}",
    hf=("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"),
    vllm="mlp.experts.routed_experts.w13_weight",
    row_sizes=("expert_ffn", "expert_ffn"),
    column_size="hidden",
    split=TensorSplit.GATE_UP,
    expert=True,
)
EXPERT_DOWN = Weight(
    megatron="mlp.experts.local_experts.{e}.linear_fc2.weight",
    megatron_alias="mlp.experts.linear_fc2.weight{e}",
    hf=("mlp.experts.{e}.down_proj.weight",),
    vllm="mlp.experts.routed_experts.w2_weight",
    row_sizes=("hidden",),
    column_size="expert_ffn",
    split=TensorSplit.COLUMNS,
    expert=True,
)
