"""Transformer Engine's layers in plain torch, for megatron-core's TE layer spec on a CPU.

Parameter names, marks and arithmetic are written after the sources of the pinned version. Every
call is checked against that version's signature in requirements/signatures.json.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, functional

_KEPT = json.loads((Path(__file__).parents[3] / "requirements" / "signatures.json").read_text())
_PIN = next(pin for pin in _KEPT if pin.startswith("transformer-engine=="))


def called_as(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Take exactly the calls that Transformer Engine's function takes; get them by keywords."""
    signature = inspect.signature(eval(f"lambda {_KEPT[_PIN][name]}: None"))

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(**signature.bind(*args, **kwargs).arguments)

        return call

    return decorate


class _Layer(torch.nn.Module):
    """A base of all layers with weights."""

    fp8 = fp8_calibration = False

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta = {"fp8_checkpoint": False}

    def get_extra_state(self) -> Tensor:
        """Return no state, as without FP8."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """There is nothing to set."""

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Return no extra state."""

    def _split(
        self, in_features: int, out_features: int, parallel_mode: str | None, tp_size: int
    ) -> None:
        self.parallel_mode = parallel_mode
        self.in_features = in_features // tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features

    def _add_weights(
        self, names: Sequence[str], init_method: Callable[..., Any], dtype: torch.dtype
    ) -> None:
        for name in names:
            weight = Parameter(torch.empty(self.out_features, self.in_features, dtype=dtype))
            init_method(weight)
            _mark(weight, 1 if self.parallel_mode == "row" else 0)
            self.register_parameter(name, weight)

    def _add_bias(self, has_bias: bool, dtype: torch.dtype) -> None:
        self.use_bias = has_bias
        if not has_bias:
            self.bias = torch.empty(0, dtype=dtype)
            return
        self.bias = Parameter(torch.zeros(self.out_features, dtype=dtype))
        if self.parallel_mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel
        elif self.parallel_mode == "column":
            _mark(self.bias, 0)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        from megatron.core import tensor_parallel as tp

        if self.parallel_mode == "column":
            enter = (
                tp.gather_from_sequence_parallel_region
                if self.sequence_parallel
                else tp.copy_to_tensor_model_parallel_region
            )
            x = enter(x, group=self.tp_group)
        output = functional.linear(x, weight)
        if self.parallel_mode == "row":
            leave = (
                tp.reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else tp.reduce_from_tensor_model_parallel_region
            )
            output = leave(output, group=self.tp_group)
        return output


def _mark(parameter: Tensor, dim: int) -> None:
    for name, value in (
        ("tensor_model_parallel", True),
        ("partition_dim", dim),
        ("partition_stride", 1),
    ):
        setattr(parameter, name, value)


def _rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps)


class Linear(_Layer):
    @called_as("Linear.__init__")
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        init_method: Callable[..., Any],
        params_dtype: torch.dtype,
        sequence_parallel: bool,
        bias: bool,
        tp_group: Any,
        tp_size: int,
        parallel_mode: str | None,
        return_bias: bool,
        fuse_wgrad_accumulation: bool,
        **others: Any,
    ) -> None:
        assert not (return_bias or fuse_wgrad_accumulation), "not the way of our models"
        super().__init__()
        self.tp_group, self.tp_size = tp_group, tp_size
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self._split(in_features, out_features, parallel_mode, tp_size)
        self._add_weights(["weight"], init_method, params_dtype)
        self._add_bias(bias, params_dtype)

    @called_as("Linear.forward")
    def forward(self, inp: Tensor, **others: Any) -> Tensor:
        output = self._product(inp, self.weight)
        return output + self.bias if self.use_bias else output


class LayerNormLinear(Linear):
    @called_as("LayerNormLinear.__init__")
    def __init__(
        self,
        in_features: int,
        *,
        eps: float,
        normalization: str,
        zero_centered_gamma: bool,
        params_dtype: torch.dtype,
        return_layernorm_output: bool,
        **others: Any,
    ) -> None:
        assert normalization == "RMSNorm" and not (zero_centered_gamma or return_layernorm_output)
        super().__init__(in_features=in_features, params_dtype=params_dtype, **others)
        self.eps = eps
        self.layer_norm_weight = Parameter(torch.ones(in_features, dtype=params_dtype))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    @called_as("LayerNormLinear.forward")
    def forward(self, inp: Tensor, **others: Any) -> Tensor:
        return super().forward(_rmsnorm(inp, self.layer_norm_weight, self.eps))


class RMSNorm(torch.nn.Module):
    @called_as("RMSNorm.__init__")
    def __init__(
        self,
        *,
        normalized_shape: int | None = None,
        hidden_size: int | None = None,
        eps: float,
        sequence_parallel: bool,
        zero_centered_gamma: bool,
        params_dtype: torch.dtype,
        kwargs: dict[str, Any],
    ) -> None:
        assert not zero_centered_gamma and kwargs.keys() <= {"device"}
        super().__init__()
        size = hidden_size if normalized_shape is None else normalized_shape
        self.eps = eps
        self.weight = Parameter(torch.ones(size, dtype=params_dtype))
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return _rmsnorm(x, self.weight, self.eps)


class DotProductAttention(torch.nn.Module):
    @called_as("DotProductAttention.__init__")
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        *,
        attention_dropout: float,
        softmax_scale: float | None,
        cp_group: Any = None,
        **others: Any,
    ) -> None:
        assert attention_dropout == 0.0
        super().__init__()
        self.softmax_scale, self.cp_group = softmax_scale, cp_group

    @called_as("DotProductAttention.forward")
    def forward(
        self,
        query_layer: Tensor,  # [T, heads, D]
        key_layer: Tensor,  # [T, kv_heads, D]
        value_layer: Tensor,  # [T, kv_heads, D]
        *,
        qkv_format: str,
        attn_mask_type: str,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        **others: Any,
    ) -> Tensor:
        assert (qkv_format, attn_mask_type) == ("thd", "padding_causal")
        assert cu_seqlens_q.dtype == torch.int32 and cu_seqlens_q.equal(cu_seqlens_kv)
        whole = (self._of_all_ranks(x, cu_seqlens_q) for x in (query_layer, key_layer, value_layer))
        parts = (x.split(cu_seqlens_q.diff().tolist()) for x in whole)
        outputs = [
            functional.scaled_dot_product_attention(
                *(x.transpose(0, 1) for x in sequence),
                is_causal=True,
                scale=self.softmax_scale,
                enable_gqa=True,
            ).transpose(0, 1)
            for sequence in zip(*parts, strict=True)
        ]
        output = torch.cat(outputs).flatten(1)
        group = self.cp_group
        return (
            output if group is None else output[_places(cu_seqlens_q, group.rank(), group.size())]
        )

    def _of_all_ranks(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """[tokens of the whole sequences, ...]; gradients are added up on the way back."""
        from megatron.core import tensor_parallel as tp

        if self.cp_group is None:
            return x
        size = self.cp_group.size()
        order = torch.cat([_places(cu_seqlens, rank, size) for rank in range(size)])
        return tp.gather_from_sequence_parallel_region(x, group=self.cp_group)[order.argsort()]


def _places(cu_seqlens: Tensor, rank: int, size: int) -> Tensor:
    """Return megatron-core's indices of a context-parallel rank's tokens."""
    from megatron.core.models.common.embeddings import rope_utils

    own = [
        rope_utils._get_thd_freqs_on_this_cp_rank(
            rank, size, torch.empty((stop - start) // size), torch.arange(start, stop)
        )
        for start, stop in pairwise(cu_seqlens.tolist())
    ]
    return torch.cat(own)


class GroupedLinear(_Layer):
    @called_as("GroupedLinear.__init__")
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        init_method: Callable[..., Any],
        params_dtype: torch.dtype,
        sequence_parallel: bool,
        bias: bool,
        tp_size: int,
        parallel_mode: str | None,
        **others: Any,
    ) -> None:
        assert not bias and tp_size == 1, "megatron-core sends tokens to experts by itself"
        super().__init__()
        self.num_gemms, self.use_bias = num_gemms, bias
        self._split(in_features, out_features, parallel_mode, tp_size)
        self.names = [f"weight{number}" for number in range(num_gemms)]
        self._add_weights(self.names, init_method, params_dtype)

    @called_as("GroupedLinear.forward")
    def forward(self, inp: Tensor, m_splits: Sequence[int], **others: Any) -> Tensor:
        parts = inp.split([int(count) for count in m_splits])
        weights = [getattr(self, name) for name in self.names]
        return torch.cat([functional.linear(*pair) for pair in zip(parts, weights, strict=True)])


@called_as("apply_rotary_pos_emb")
def apply_rotary_pos_emb(
    t: Tensor,  # [T, heads, D]
    freqs: Tensor,  # [longest, 1, 1, D]
    *,
    tensor_format: str,
    interleaved: bool = False,
    fused: bool,
    cu_seqlens: Tensor,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    assert (tensor_format, interleaved, fused) == ("thd", False, True)
    positions = torch.cat([torch.arange(length) for length in cu_seqlens.diff().tolist()])
    angles = freqs[positions[_places(cu_seqlens, cp_rank, cp_size)], 0].float()
    first, second = t.chunk(2, dim=-1)
    return t * angles.cos().to(t.dtype) + torch.cat([-second, first], -1) * angles.sin().to(t.dtype)


@called_as("moe_permute_with_probs")
def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    experts, tokens = routing_map.bool().T.nonzero(as_tuple=True)
    assert len(tokens) == num_out_tokens
    return inp[tokens], probs[tokens, experts], tokens


@called_as("moe_permute")
def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int, **others: Any
) -> tuple[Tensor, Tensor]:
    _, tokens = routing_map.bool().T.nonzero(as_tuple=True)
    return inp[tokens], tokens


@called_as("moe_unpermute")
def moe_unpermute(
    inp: Tensor, row_id_map: Tensor, restore_shape: torch.Size, **others: Any
) -> Tensor:
    assert others.get("merging_probs") is None, "experts have weighted their own outputs"
    return inp.new_zeros(restore_shape).index_add(0, row_id_map, inp)


@called_as("moe_sort_chunks_by_index")
def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    parts = inp.split(split_sizes.tolist())
    return torch.cat([parts[index] for index in sorted_index.tolist()])


@called_as("moe_sort_chunks_by_index_with_probs")
def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    order = (split_sizes, sorted_index)
    return moe_sort_chunks_by_index(inp, *order), moe_sort_chunks_by_index(probs, *order)


def _unused(*names: str) -> tuple[type, ...]:
    """A class that is imported or derived from, but never used."""
    return tuple(type(name, (), {}) for name in names)


_MODULES: dict[str, tuple[object, ...]] = {
    "": (),
    "common": (),
    "common.recipe": _unused("DelayedScaling"),
    "pytorch": (Linear, LayerNormLinear, RMSNorm, DotProductAttention, GroupedLinear),
    "pytorch.attention": (),
    "pytorch.attention.rope": (apply_rotary_pos_emb,),
    "pytorch.distributed": _unused(
        "CudaRNGStatesTracker", "activation_recompute_forward", "checkpoint"
    ),
    "pytorch.fp8": _unused("FP8GlobalStateManager", "fp8_autocast", "fp8_model_init"),
    "pytorch.ops": _unused("FusibleOperation", "Sequential"),
    "pytorch.tensor": _unused("QuantizedTensor"),
    "pytorch.router": _unused(
        "fused_compute_score_for_moe_aux_loss",
        "fused_moe_aux_loss",
        "fused_topk_with_score_function",
    ),
    "pytorch.permutation": (
        moe_permute,
        moe_permute_with_probs,
        moe_sort_chunks_by_index,
        moe_sort_chunks_by_index_with_probs,
        moe_unpermute,
    ),
}
"""Import paths of Transformer Engine that megatron-core uses; others count as an older version's
or a missing extra."""


def install() -> None:
    """Be Transformer Engine in this process; call before megatron-core is imported."""
    assert "megatron.core" not in sys.modules, "megatron-core has looked for it already"
    for path, members in _MODULES.items():
        name = f"transformer_engine.{path}".rstrip(".")
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []
        for member in members:
            setattr(module, member.__name__, member)
        owner, _, own = name.rpartition(".")
        if owner:
            setattr(sys.modules[owner], own, module)
    sys.modules["transformer_engine"].__version__ = _PIN.partition("==")[2]
