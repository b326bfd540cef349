"""Products whose weight gradient is added to main_grad at once, as Transformer Engine has them.

A GPU does so if apex is installed (megatron-core's `gradient_accumulation_fusion`). Written after
the sources of the pinned versions.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

APEX_KERNEL = "fused_weight_gradient_mlp_cuda"


class Product(torch.autograd.Function):
    """x W^T. A fused gradient of W is added to main_grad, and autograd gets a dummy for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, is_fused: bool, is_first: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.is_fused, ctx.is_first = weight, is_fused, is_first
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        d_x, rows, columns = d_output @ weight, d_output.flatten(0, -2), x.flatten(0, -2)
        if not ctx.is_fused:
            return d_x, rows.t() @ columns, None, None
        weight = ctx.weight
        if ctx.is_first:
            # the first micro-batch overwrites what it finds
            weight.main_grad.zero_()
        wgrad_gemm_accum_fp32(columns, rows, weight.main_grad)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return d_x, None, None, None
        weight.grad_added_to_main_grad = True
        zero = getattr(weight, "zero_out_wgrad", False)
        return d_x, get_dummy_wgrad(list(weight.shape), weight.dtype, zero=zero), None, None


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """Return a gradient whose values must not be read, unless they are zeros."""
    return torch.full(shape, 0.0 if zero else torch.nan, dtype=dtype)


def wgrad_gemm_accum_fp32(x: Tensor, d_output: Tensor, main_grad: Tensor) -> None:
    """Add a weight's gradient without rounding it to the type of the activations."""
    main_grad.add_(d_output.t().to(main_grad.dtype) @ x.to(main_grad.dtype))


def wgrad_gemm_accum_fp16(x: Tensor, d_output: Tensor, main_grad: Tensor) -> None:
    raise AssertionError("our gradient buffers are fp32")


def install_apex() -> None:
    """Be apex's kernel in this process; call before megatron-core is imported."""
    assert "megatron.core" not in sys.modules, "megatron-core has looked for it already"
    apex = sys.modules[APEX_KERNEL] = ModuleType(APEX_KERNEL)
    apex.__spec__ = ModuleSpec(APEX_KERNEL, None)
    apex.wgrad_gemm_accum_fp32 = wgrad_gemm_accum_fp32
    apex.wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp16
