"""From a model's description to megatron-core's GPTModel chunks of this rank.

Machines without Transformer Engine have our own layers: RMSNorm, SwiGLU, packed attention. They are
in torch, and in C on a CPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from megadapo.kernels.attention import packed_attention, should_use_packed_attention
from megadapo.kernels.rmsnorm import rmsnorm
from megadapo.kernels.rotary import rotary
from megadapo.kernels.swiglu import swiglu
from megadapo.models.description import ModelDescription
from megadapo.trainer.batch.packing import Bucket, PackedSequences, from_padded, to_padded
from megadapo.trainer.config import TrainerConfig
from megadapo.trainer.model.experts import (
    BalancedRouter,
    expert_options,
    mark_experts,
    release_routing_graphs,
    replay_choices,
)
from megadapo.trainer.model.megatron_internals import (
    HookedGPTModel,
    submodules_of,
    sum_gradients_by_torch,
    uses_transformer_engine,
)
from megadapo.weights.layout.layout import padded_vocab_size


def transformer_config(
    model: ModelDescription, trainer: TrainerConfig, *, dtype: torch.dtype
) -> TransformerConfig:
    """Return megatron-core's description of a model that passed `validate_model_layout`."""
    shape = model.shape
    uses_te, uses_cuda = uses_transformer_engine(), torch.cuda.is_available()
    if uses_cuda:
        sum_gradients_by_torch()
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        add_qkv_bias=model.family.has_qkv_bias,
        qk_layernorm=model.family.has_qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # loss weights contain the whole reduction, so gradients are plain sums everywhere
        calculate_per_token_loss=True,
        # data-parallel ranks that share experts have different numbers of tokens; megatron-core
        # also checks it against variable_seq_lengths without experts
        moe_token_dispatcher_type="alltoall",
        **_split_options(trainer),
        **expert_options(model, trainer),
        **_recompute_options(model, trainer),
        # the values are overwritten later, but initialization also marks sharded parameters: the
        # gradient norm counts unmarked ones on one rank only
        perform_initialization=True,
        use_cpu_initialization=not uses_cuda,
        # sums weight gradients in fp32 without rounding each of them to bf16
        gradient_accumulation_fusion=uses_cuda,
        apply_rope_fusion=uses_te,
        bias_activation_fusion=uses_te,
        # makes megatron-core use the layer spec's activation
        use_te_activation_func=not uses_te,
        deterministic_mode=uses_cuda and trainer.deterministic,
    )


def _split_options(trainer: TrainerConfig) -> dict[str, Any]:
    """Return megatron-core's options for the split over ranks and the messages between stages."""
    interleaved = trainer.virtual_pipeline > 1
    return {
        "tensor_model_parallel_size": trainer.tensor_parallel,
        "pipeline_model_parallel_size": trainer.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": trainer.virtual_pipeline if interleaved else None,
        "context_parallel_size": trainer.context_parallel,
        "num_layers_in_first_pipeline_stage": trainer.first_stage_layers or None,
        "num_layers_in_last_pipeline_stage": trainer.last_stage_layers or None,
        "sequence_parallel": trainer.sequence_parallel,
        # every micro-batch has its own number of tokens
        "variable_seq_lengths": trainer.pipeline_parallel > 1,
        # with two stages, the interleaved schedule would put messages of both directions into one
        # batch, where they cannot be told apart
        "batch_p2p_comm": torch.cuda.is_available() and not interleaved,
        "overlap_p2p_comm": interleaved,
    }


def _recompute_options(model: ModelDescription, trainer: TrainerConfig) -> dict[str, Any]:
    """Return megatron-core's options for `trainer.recompute`."""
    if not trainer.recompute:
        return {}
    if trainer.recompute == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    mlp = "moe" if model.routing is not None else "mlp"
    modules = [mlp if module == "mlp" else module for module in trainer.recompute]
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def build_chunks(
    config: TransformerConfig, model: ModelDescription, trainer: TrainerConfig
) -> list[GPTModel]:
    """Return this rank's chunks in model order; their weights are not set yet."""
    chunks = range(trainer.virtual_pipeline) if trainer.virtual_pipeline > 1 else [None]
    return [_build_chunk(config, model, trainer, chunk) for chunk in chunks]


def _build_chunk(
    config: TransformerConfig, model: ModelDescription, trainer: TrainerConfig, chunk: int | None
) -> GPTModel:
    uses_te = uses_transformer_engine()
    spec = _te_layer_spec(config) if uses_te else local_block_spec(config, chunk)
    gpt = HookedGPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab_size(model.shape.vocab_size, trainer.tensor_parallel),
        max_sequence_length=model.max_positions,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        share_embeddings_and_output_weights=model.shape.tied,
        # our own attention applies the rotary embedding itself, per packed sequence
        position_embedding_type="rope" if uses_te else "none",
        vp_stage=chunk,
    )
    if model.routing is not None:
        mark_experts(gpt)
        release_routing_graphs(gpt)
        if trainer.router_replay:
            replay_choices(gpt)
    if uses_te:
        gpt.rotary_pos_emb.inv_freq = inverse_frequencies(model).cuda()
    # megatron-core creates routers on the CPU
    return gpt.cuda()


def rotary_of_own_layers(model: ModelDescription) -> Tensor | None:
    """Return [D / 2] `inverse_frequencies` for our own layers; None with Transformer Engine."""
    return None if uses_transformer_engine() else inverse_frequencies(model)


def inverse_frequencies(model: ModelDescription) -> Tensor:
    """Return [D / 2] fp32 angle per position of each rotary pair, with the config's scaling."""
    rope, size = model.rope, model.shape.head_dim
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        # Llama 3.1: divide slow pairs by `factor`, keep fast ones and blend the others
        turns = rope.original_max_positions * frequencies / (2 * math.pi)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return kept * frequencies + (1.0 - kept) * frequencies / rope.factor
    return frequencies


def _te_layer_spec(config: TransformerConfig) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )
    if config.num_moe_experts:
        submodules_of(layer.submodules.mlp).router = BalancedRouter
    return layer


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight with fp32 statistics; works on sequence-parallel activations."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        # each tensor-parallel rank has a partial gradient; megatron sums those with this mark
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # megatron-core's mark

    def forward(self, x: Tensor) -> Tensor:
        return rmsnorm(x, self.weight, self.eps)


class SwiGLU(MegatronModule):  # type: ignore[misc]  # megatron-core has no types
    """silu(gate) * up, for the MLP's first product, which holds both side by side."""

    def forward(self, gate_up: Tensor) -> Tensor:
        return swiglu(gate_up)


class PackedAttention(torch.nn.Module):
    """Causal attention inside each packed sequence, with grouped queries.

    With context parallelism, each rank gets all keys and values and places its own queries at
    their positions in whole sequences. The other rows are wasted work. With two ranks, that costs
    as much as a mask instead of plain causality.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ):
        super().__init__()
        assert attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        assert config.attention_dropout == 0.0, "policy training has no dropout"
        self.scale = softmax_scale
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: Tensor,  # [T, heads, D]
        key: Tensor,  # [T, kv_heads, D]
        value: Tensor,  # [T, kv_heads, D]
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """Return the attention output [T, heads * D]."""
        packed = packed_seq_params
        assert packed is not None
        assert packed.padded_rows is not None and packed.token_of_row is not None
        assert packed.key_rows is not None and packed.key_of_row is not None
        assert packed.cos is not None and packed.sin is not None
        query, key = (rotary(x, packed.cos, packed.sin) for x in (query, key))
        longest = packed.max_seqlen_q
        if self.cp_group is None and should_use_packed_attention(query, key, value, longest):
            out = packed_attention(
                query, key, value, packed.cu_seqlens_q, longest=longest, scale=self.scale
            )
            return out.flatten(1)
        key, value = self._of_all_ranks(key, value)
        padded = [
            to_padded(query, packed.padded_rows, packed.token_of_row),
            to_padded(key, packed.key_rows, packed.key_of_row),
            to_padded(value, packed.key_rows, packed.key_of_row),
        ]
        # `split` concatenates the parts' gradients in one pass over memory
        rows = [bucket.num_sequences * bucket.length for bucket in packed.buckets]
        parts = zip(*(x.split(rows) for x in padded), strict=True)
        outputs = [
            self._bucket_attention(bucket, *part)
            for bucket, part in zip(packed.buckets, parts, strict=True)
        ]
        return from_padded(torch.cat(outputs), packed.padded_rows).flatten(1)

    def _of_all_ranks(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of all context-parallel ranks, in rank order."""
        if self.cp_group is None:
            return key, value
        # a rank's gradient covers its own queries only; the gather's backward pass sums them
        both = gather_from_sequence_parallel_region(
            torch.cat([key, value], dim=1), group=self.cp_group
        )
        key, value = both.chunk(2, dim=1)
        return key, value

    def _bucket_attention(self, bucket: Bucket, *rows: Tensor) -> Tensor:
        """Return [rows, heads, D]; gaps follow their sequence, so causality hides them."""
        query, key, value = (
            x.unflatten(0, (bucket.num_sequences, bucket.length)).transpose(1, 2) for x in rows
        )
        if query.device.type == "cuda" and query.dtype == torch.float32:
            # torch's fused fp32 kernel knows no groups; its plain one holds every pair of tokens
            repeats = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        output = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.transpose(1, 2).flatten(0, 1)


def local_block_spec(config: TransformerConfig, chunk: int | None) -> TransformerBlockSubmodules:
    """Return megatron-core's local layer spec with our own norm, attention and activation.

    `chunk`: index of the stage's chunk, with an interleaved pipeline.
    """
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    mlp = submodules_of(layer.submodules.mlp)
    if config.num_moe_experts:
        mlp.router = BalancedRouter
        mlp = submodules_of(mlp.experts)
    mlp.activation_func = SwiGLU
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    num_layers = get_num_layers_to_build(config, vp_stage=chunk)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)
