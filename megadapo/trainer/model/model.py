"""From a model's description to megatron-core's GPTModel chunks of this rank."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from megadapo.models.description import ModelDescription
from megadapo.trainer.config import TrainerConfig
from megadapo.trainer.model.experts import (
    BalancedRouter,
    expert_options,
    mark_experts,
    release_routing_graphs,
)
from megadapo.trainer.model.layers import local_block_spec
from megadapo.trainer.model.megatron_internals import (
    HookedGPTModel,
    submodules_of,
    sum_gradients_by_torch,
    uses_transformer_engine,
)
from megadapo.trainer.model.router_replay import replay_choices
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
        add_qkv_bias=shape.attention_bias,
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
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )

    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )
    if config.num_moe_experts:
        submodules_of(layer.submodules.mlp).router = BalancedRouter
    return layer
