"""Our own layers, for machines without Transformer Engine: RMSNorm, SwiGLU, packed attention."""

from __future__ import annotations

from typing import Any

import torch
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
from megadapo.trainer.batch.packing import Bucket, PackedSequences, from_padded, to_padded
from megadapo.trainer.model.experts import BalancedRouter
from megadapo.trainer.model.megatron_internals import submodules_of


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

    Args:
        chunk: index of the stage's chunk, with an interleaved pipeline.
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
