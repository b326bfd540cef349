"""Transformer Engine's layers in plain torch, for megatron-core's TE layer spec on a CPU.

Parameter names, marks and arithmetic are written after the sources of the pinned version. Every
call is checked against that version's signature in requirements/signatures.json.
"""

import functools
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, functional
from torch.optim.adamw import adamw

from tests.support.trainer.fused_gradients import Product, get_dummy_wgrad

_KEPT = json.loads((Path(__file__).parents[3] / "requirements" / "signatures.json").read_text())
_PIN = next(pin for pin in _KEPT if pin.startswith("transformer-engine=="))


def called_as(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Take exactly Transformer Engine's calls; the function gets one object of their arguments."""
    signature = inspect.signature(eval(f"lambda {_KEPT[_PIN][name]}: None"))

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def bind(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            owner = [given.pop("self")] if "self" in given else []
            return function(*owner, SimpleNamespace(**given))

        return bind

    return decorate


class _Layer(torch.nn.Module):
    """A base of all layers with weights."""

    fp8 = fp8_calibration = False

    def _build(self, call: Any, names: Sequence[str]) -> None:
        super().__init__()
        self.fp8_meta = {"fp8_checkpoint": False}
        mode, size = call.parallel_mode, call.tp_size
        self.in_features = call.in_features // size if mode == "row" else call.in_features
        self.out_features = call.out_features // size if mode == "column" else call.out_features
        self.parallel_mode, self.tp_group, self.tp_size = mode, call.tp_group, size
        self.sequence_parallel = size > 1 and call.sequence_parallel
        self.fuse_wgrad_accumulation = call.fuse_wgrad_accumulation
        dtype = call.params_dtype
        for name in names:
            weight = Parameter(torch.empty(self.out_features, self.in_features, dtype=dtype))
            call.init_method(weight)
            _mark(weight, 1 if mode == "row" else 0)
            self.register_parameter(name, weight)
        self.use_bias = call.bias
        if not call.bias:
            self.bias = torch.empty(0, dtype=dtype)
            return
        self.bias = Parameter(torch.zeros(self.out_features, dtype=dtype))
        if mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel
        elif mode == "column":
            _mark(self.bias, 0)

    def get_extra_state(self) -> Tensor:
        """Return no state, as without FP8."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """There is nothing to set."""

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Return no extra state."""


def _mark(parameter: Tensor, dim: int) -> None:
    parameter.tensor_model_parallel, parameter.partition_dim = True, dim
    parameter.partition_stride = 1


def _rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps)


class Linear(_Layer):
    @called_as("Linear.__init__")
    def __init__(self, call: Any) -> None:
        assert not call.return_bias, "not the way of our models"
        self._build(call, ["weight"])

    @called_as("Linear.forward")
    def forward(self, call: Any) -> Tensor:
        return self._product(call.inp, call)

    def _product(self, x: Tensor, call: Any) -> Tensor:
        from megatron.core import tensor_parallel as tp

        whole = not self.sequence_parallel
        if self.parallel_mode == "column":
            enter = (
                tp.copy_to_tensor_model_parallel_region
                if whole
                else tp.gather_from_sequence_parallel_region
            )
            x = enter(x, group=self.tp_group)
        is_first = bool(getattr(call, "is_first_microbatch", None))
        output = Product.apply(x, self.weight, self.fuse_wgrad_accumulation, is_first)
        if self.parallel_mode == "row":
            leave = (
                tp.reduce_from_tensor_model_parallel_region
                if whole
                else tp.reduce_scatter_to_sequence_parallel_region
            )
            output = leave(output, group=self.tp_group)
        return output + self.bias if self.use_bias else output


class LayerNormLinear(Linear):
    @called_as("LayerNormLinear.__init__")
    def __init__(self, call: Any) -> None:
        assert call.normalization == "RMSNorm"
        assert not (call.zero_centered_gamma or call.return_layernorm_output)
        assert not call.return_bias, "not the way of our models"
        self._build(call, ["weight"])
        self.eps = call.eps
        norm = torch.ones(call.in_features, dtype=call.params_dtype)
        self.layer_norm_weight = Parameter(norm)
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    @called_as("LayerNormLinear.forward")
    def forward(self, call: Any) -> Tensor:
        return self._product(_rmsnorm(call.inp, self.layer_norm_weight, self.eps), call)


class RMSNorm(torch.nn.Module):
    @called_as("RMSNorm.__init__")
    def __init__(self, call: Any) -> None:
        assert not call.zero_centered_gamma and call.kwargs.keys() <= {"device"}
        super().__init__()
        size = call.hidden_size if hasattr(call, "hidden_size") else call.normalized_shape
        self.eps = call.eps
        self.weight = Parameter(torch.ones(size, dtype=call.params_dtype))
        self.weight.sequence_parallel = call.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return _rmsnorm(x, self.weight, self.eps)


class DotProductAttention(torch.nn.Module):
    @called_as("DotProductAttention.__init__")
    def __init__(self, call: Any) -> None:
        assert call.attention_dropout == 0.0
        super().__init__()
        self.softmax_scale, self.cp_group = call.softmax_scale, getattr(call, "cp_group", None)

    @called_as("DotProductAttention.forward")
    def forward(self, call: Any) -> Tensor:
        """Return the outputs of packed sequences; layers are [T, heads, D]."""
        assert (call.qkv_format, call.attn_mask_type) == ("thd", "padding_causal")
        edges, group = call.cu_seqlens_q, self.cp_group
        assert edges.dtype == torch.int32 and edges.equal(call.cu_seqlens_kv)
        layers = (call.query_layer, call.key_layer, call.value_layer)
        parts = (self._of_all_ranks(x, edges).split(edges.diff().tolist()) for x in layers)
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
        return output if group is None else output[_places(edges, group.rank(), group.size())]

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
        # the only place where megatron-core says which tokens a rank has
        rope_utils._get_thd_freqs_on_this_cp_rank(
            rank, size, torch.empty((stop - start) // size), torch.arange(start, stop)
        )
        for start, stop in pairwise(cu_seqlens.tolist())
    ]
    return torch.cat(own)


class GroupedLinear(_Layer):
    @called_as("GroupedLinear.__init__")
    def __init__(self, call: Any) -> None:
        assert not call.bias and call.tp_size == 1, "megatron-core sends tokens itself"
        self.names = [f"weight{number}" for number in range(call.num_gemms)]
        self._build(call, self.names)
        self.num_gemms = call.num_gemms

    @called_as("GroupedLinear.forward")
    def forward(self, call: Any) -> Tensor:
        parts = call.inp.split([int(count) for count in call.m_splits])
        weights = [getattr(self, name) for name in self.names]
        how = (self.fuse_wgrad_accumulation, bool(getattr(call, "is_first_microbatch", None)))
        pairs = zip(parts, weights, strict=True)
        return torch.cat([Product.apply(*pair, *how) for pair in pairs])


@called_as("apply_rotary_pos_emb")
def apply_rotary_pos_emb(call: Any) -> Tensor:
    """Rotate `t` [T, heads, D] by `freqs` [longest, 1, 1, D]."""
    assert call.tensor_format == "thd" and call.fused and not getattr(call, "interleaved", False)
    positions = torch.cat([torch.arange(n) for n in call.cu_seqlens.diff().tolist()])
    own = _places(call.cu_seqlens, call.cp_rank, call.cp_size)
    x, angles = call.t, call.freqs[positions[own], 0].float()
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos().to(x.dtype) + torch.cat([-second, first], -1) * angles.sin().to(x.dtype)


@called_as("moe_permute_with_probs")
def moe_permute_with_probs(call: Any) -> tuple[Tensor, Tensor, Tensor]:
    experts, tokens = call.routing_map.bool().T.nonzero(as_tuple=True)
    assert len(tokens) == call.num_out_tokens
    return call.inp[tokens], call.probs[tokens, experts], tokens


@called_as("moe_unpermute")
def moe_unpermute(call: Any) -> Tensor:
    merging = getattr(call, "merging_probs", None)
    assert merging is None, "experts have weighted their own outputs"
    return call.inp.new_zeros(call.restore_shape).index_add(0, call.row_id_map, call.inp)


@called_as("moe_sort_chunks_by_index")
def moe_sort_chunks_by_index(call: Any) -> Tensor:
    parts = call.inp.split(call.split_sizes.tolist())
    return torch.cat([parts[index] for index in call.sorted_index.tolist()])


@called_as("moe_sort_chunks_by_index_with_probs")
def moe_sort_chunks_by_index_with_probs(call: Any) -> tuple[Tensor, Tensor]:
    order = (call.split_sizes, call.sorted_index)
    return moe_sort_chunks_by_index(call.inp, *order), moe_sort_chunks_by_index(call.probs, *order)


class FusedAdam(torch.optim.Optimizer):
    """AdamW that counts updates by group, and makes moments in the first step if it has none."""

    def __init__(self, params: Any, adam_w_mode: bool = True, **defaults: Any) -> None:
        assert adam_w_mode, "weight decay is no part of the gradient"
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for weight in group["params"]:
                state = self.state[weight]
                for moment in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(moment, torch.zeros_like(weight))
                adamw(
                    [weight],
                    [weight.grad],
                    [state["exp_avg"]],
                    [state["exp_avg_sq"]],
                    [],
                    [torch.tensor(group["step"] - 1.0)],
                    fused=True,
                    amsgrad=False,
                    maximize=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    **{name: group[name] for name in ("lr", "weight_decay", "eps")},
                )


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
    "pytorch.module": (),
    "pytorch.module.base": (get_dummy_wgrad,),
    "pytorch.fp8": _unused("FP8GlobalStateManager", "fp8_autocast", "fp8_model_init"),
    "pytorch.ops": _unused("FusibleOperation", "Sequential"),
    "pytorch.tensor": _unused("QuantizedTensor"),
    "pytorch.router": _unused(
        "fused_compute_score_for_moe_aux_loss",
        "fused_moe_aux_loss",
        "fused_topk_with_score_function",
    ),
    "pytorch.permutation": (
        *_unused("moe_permute"),
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
