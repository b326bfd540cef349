"""Layer spec for machines without Transformer Engine: RMSNorm, rotary and packed attention.

Attention never sees a mask over the whole packed micro-batch: sequences of similar length are
padded into one causal batch, so memory and work follow the sequences, not their sum squared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from megadapo.kernels.rmsnorm import rmsnorm
from megadapo.kernels.rotary import rotary
from megadapo.kernels.swiglu import swiglu
from megadapo.trainer.expert_balance import BalancedRouter
from megadapo.trainer.megatron_internals import submodules_of

SHORT_SEQUENCE = 32
"""Sequences up to this length share a bucket: the padding costs less than another call."""
SHORTEST_OF_BUCKET = 0.75
"""A sequence joins a bucket if it is at least this long against the bucket's longest."""


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, padded to one length, at an offset of the padded buffer."""

    offset: int
    num_sequences: int
    length: int


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]  # megatron-core has no types
    """Where sequences begin and end, plus what our own layers need to respect it."""

    cos: Tensor | None = None  # [T, D / 2] of the rotary embedding
    sin: Tensor | None = None  # [T, D / 2]
    buckets: tuple[Bucket, ...] = ()
    padded_rows: Tensor | None = None  # [T] row of the padded buffer that holds token t
    token_of_row: Tensor | None = None  # [padded rows] the token there; 0 in the gaps

    def to(self, device: torch.device) -> PackedSequences:
        """The same with every tensor on the device."""
        return replace(self, **tensors_on(self, device))


def tensors_on(holder: Any, device: torch.device) -> dict[str, Any]:
    """Those fields of a dataclass's object that are tensors, copied to the device."""
    values = {field.name: getattr(holder, field.name) for field in fields(holder) if field.init}
    return {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}


def pack_sequences(lengths: list[int], inverse_frequencies: Tensor | None) -> PackedSequences:
    """Lay out sequences of the given lengths (all positive), packed in this order, on the host.

    Args:
        inverse_frequencies: [D / 2] of the rotary embedding; None leaves out what only our own
            layers read.
    """
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    packed = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    if inverse_frequencies is None:
        return packed
    buckets, padded_rows, num_padded_rows = _buckets(lengths, cu_seqlens)
    token_of_row = torch.zeros(num_padded_rows, dtype=torch.int64)
    token_of_row[padded_rows] = torch.arange(len(padded_rows))
    positions = torch.cat([torch.arange(n, dtype=torch.float32) for n in lengths])
    angles = torch.outer(positions, inverse_frequencies.cpu())
    return replace(
        packed,
        cos=angles.cos(),
        sin=angles.sin(),
        buckets=buckets,
        padded_rows=padded_rows,
        token_of_row=token_of_row,
    )


def _buckets(lengths: list[int], cu_seqlens: Tensor) -> tuple[tuple[Bucket, ...], Tensor, int]:
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    members: list[list[int]] = []
    for index in order:
        longest = lengths[members[-1][0]] if members else 0
        joins = lengths[index] >= SHORTEST_OF_BUCKET * longest or longest <= SHORT_SEQUENCE
        if members and joins:
            members[-1].append(index)
        else:
            members.append([index])
    buckets: list[Bucket] = []
    rows = torch.empty(int(cu_seqlens[-1]), dtype=torch.int64)
    offset = 0
    for bucket in members:
        length = lengths[bucket[0]]
        buckets.append(Bucket(offset, len(bucket), length))
        for index in bucket:
            start = int(cu_seqlens[index])
            rows[start : start + lengths[index]] = torch.arange(offset, offset + lengths[index])
            offset += length
    return tuple(buckets), rows, offset


class _ToPadded(torch.autograd.Function):
    """x [T, ...] to [padded rows, ...]; what a gap holds is not differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, token_of_row: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        # one pass over memory, where zeros in the gaps would take two
        return x.index_select(0, token_of_row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return grad.index_select(0, rows), None, None


class _FromPadded(torch.autograd.Function):
    """The inverse: padded [num_rows, ...] to [T, ...]."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = padded.shape[0]
        return padded.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        padded = grad.new_zeros(ctx.num_rows, *grad.shape[1:])
        return padded.index_copy_(0, rows, grad), None


_to_padded: Callable[[Tensor, Tensor, Tensor], Tensor] = _ToPadded.apply
_from_padded: Callable[[Tensor, Tensor], Tensor] = _FromPadded.apply


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight with fp32 statistics; works on sequence-parallel activations."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        # its gradient is a partial sum on each tensor-parallel rank, which megatron adds up
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # a mark of megatron-core's

    def forward(self, x: Tensor) -> Tensor:
        return rmsnorm(x, self.weight, self.eps)


class SwiGLU(MegatronModule):  # type: ignore[misc]  # megatron-core has no types
    """silu(gate) * up of the MLP's first product, where both lie beside each other."""

    def forward(self, gate_up: Tensor) -> Tensor:
        return swiglu(gate_up)


class PackedAttention(torch.nn.Module):
    """Causal attention inside each packed sequence, with grouped queries."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: object | None = None,
    ):
        super().__init__()
        assert attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        assert config.context_parallel_size == 1, "packed attention does not split sequences"
        assert config.attention_dropout == 0.0, "policy training has no dropout"
        self.scale = softmax_scale

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
        """Attention output [T, heads * D]."""
        packed = packed_seq_params
        assert packed is not None
        assert packed.padded_rows is not None and packed.token_of_row is not None
        assert packed.cos is not None and packed.sin is not None
        query = rotary(query, packed.cos, packed.sin)
        key = rotary(key, packed.cos, packed.sin)
        padded = [
            _to_padded(x, packed.padded_rows, packed.token_of_row) for x in (query, key, value)
        ]
        outputs = [self._bucket_attention(bucket, *padded) for bucket in packed.buckets]
        return _from_padded(torch.cat(outputs), packed.padded_rows).flatten(1)

    def _bucket_attention(self, bucket: Bucket, *padded: Tensor) -> Tensor:
        """[rows, heads, D]; gaps lie behind their sequence, so causality hides them."""
        rows = bucket.num_sequences * bucket.length
        query, key, value = (
            x.narrow(0, bucket.offset, rows)
            .unflatten(0, (bucket.num_sequences, bucket.length))
            .transpose(1, 2)
            for x in padded
        )
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
    """megatron-core's local layer spec with our norm and attention in it.

    Args:
        chunk: of this stage, where the pipeline is interleaved.
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
