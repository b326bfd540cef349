"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight, statistics in fp32.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467). The
weight's gradient is summed in a fixed order without atomics: the same bits on every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megadapo.kernels.cpu.layers import implementation, rmsnorm_c, rmsnorm_grads_c
from megadapo.kernels.launch import block_size, count_bytes, uses_triton, warps_for

_NUM_PARTIAL_SUMS = 256
"""Rows of partial weight gradients: enough programs to fill a GPU, few enough to sum cheaply."""
_LARGEST_ROW = 16384
_MOST_WARPS = 16
"""Warps for the longest rows. A whole row is in registers: 16 elements per thread for 8192."""


def rmsnorm_definition(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Define the layer: differentiable, in fp32 or wider, rounded once."""
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (normed * weight.to(wide.dtype)).to(x.dtype)


@triton.jit
def rmsnorm_fwd_kernel(
    X: tl.tensor,
    WEIGHT: tl.tensor,
    Y: tl.tensor,
    INVERSE_RMS: tl.tensor,
    num_columns: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    x = tl.load(X + row * num_columns + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(WEIGHT + columns, mask=inside, other=0.0).to(tl.float32)
    inverse_rms = 1.0 / tl.sqrt(tl.sum(x * x, 0) / num_columns + eps)
    y = x * inverse_rms * weight
    tl.store(INVERSE_RMS + row, inverse_rms)
    tl.store(Y + row * num_columns + columns, y.to(Y.dtype.element_ty), mask=inside)


@triton.jit
def rmsnorm_bwd_kernel(
    X: tl.tensor,
    WEIGHT: tl.tensor,
    D_Y: tl.tensor,
    INVERSE_RMS: tl.tensor,
    D_X: tl.tensor,
    PARTIAL: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    weight = tl.load(WEIGHT + columns, mask=inside, other=0.0).to(tl.float32)
    partial = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, num_rows, tl.num_programs(0)):
        at = row * num_columns + columns
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        d_y = tl.load(D_Y + at, mask=inside, other=0.0).to(tl.float32)
        inverse_rms = tl.load(INVERSE_RMS + row)
        normed = x * inverse_rms
        scaled = d_y * weight
        mean = tl.sum(scaled * normed, 0) / num_columns
        d_x = (scaled - normed * mean) * inverse_rms
        tl.store(D_X + at, d_x.to(D_X.dtype.element_ty), mask=inside)
        partial += d_y * normed
    tl.store(PARTIAL + program * num_columns + columns, partial, mask=inside)


def _forward_triton(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    num_rows, num_columns = x.shape
    y = torch.empty_like(x)
    inverse_rms = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    block = block_size(num_columns, largest=_LARGEST_ROW)
    if num_rows:
        rmsnorm_fwd_kernel[(num_rows,)](
            X=x,
            WEIGHT=weight,
            Y=y,
            INVERSE_RMS=inverse_rms,
            num_columns=num_columns,
            eps=eps,
            BLOCK=block,
            num_warps=warps_for(block, largest=_MOST_WARPS),
        )
        count_bytes(rmsnorm_fwd_kernel.__name__, x, y)
    return y, inverse_rms


def _backward_triton(
    x: Tensor, weight: Tensor, inverse_rms: Tensor, d_y: Tensor
) -> tuple[Tensor, Tensor]:
    num_rows, num_columns = x.shape
    d_x = torch.empty_like(x)
    programs = min(num_rows, _NUM_PARTIAL_SUMS)
    partial = torch.empty(programs, num_columns, dtype=torch.float32, device=x.device)
    block = block_size(num_columns, largest=_LARGEST_ROW)
    if num_rows:
        rmsnorm_bwd_kernel[(programs,)](
            X=x,
            WEIGHT=weight,
            D_Y=d_y,
            INVERSE_RMS=inverse_rms,
            D_X=d_x,
            PARTIAL=partial,
            num_rows=num_rows,
            num_columns=num_columns,
            BLOCK=block,
            num_warps=warps_for(block, largest=_MOST_WARPS),
        )
        count_bytes(rmsnorm_bwd_kernel.__name__, x, d_y, d_x, partial)
    return d_x, partial.sum(0)


def _forward_torch(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.float()
    inverse_rms = (torch.linalg.vector_norm(wide, dim=-1).square_() / x.shape[-1] + eps).rsqrt_()
    y = wide * inverse_rms[:, None]
    return y.mul_(weight.float()).to(x.dtype), inverse_rms


def _backward_torch(
    x: Tensor, weight: Tensor, inverse_rms: Tensor, d_y: Tensor
) -> tuple[Tensor, Tensor]:
    normed = x.float() * inverse_rms[:, None]
    d_y = d_y.float()
    products = d_y * normed
    mean = products @ weight.float()
    mean /= x.shape[-1]
    d_x = (d_y * weight.float()).addcmul_(normed, mean[:, None], value=-1.0)
    return d_x.mul_(inverse_rms[:, None]).to(x.dtype), products.sum(0)


_FORWARD = {"triton": _forward_triton, "c": rmsnorm_c, "torch": _forward_torch}
_BACKWARD = {"triton": _backward_triton, "c": rmsnorm_grads_c, "torch": _backward_torch}


class _RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y, inverse_rms = _FORWARD[implementation(x, weight)](rows, weight, eps)
        ctx.save_for_backward(rows, weight, inverse_rms)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, inverse_rms = ctx.saved_tensors
        run = _BACKWARD[implementation(rows, weight, d_y)]
        d_x, d_weight = run(rows, weight, inverse_rms, d_y.reshape(rows.shape).contiguous())
        return d_x.view(d_y.shape), d_weight.to(weight.dtype), None


_rmsnorm: Callable[[Tensor, Tensor, float], Tensor] = _RMSNormFunction.apply


def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Normalise the last dimension of x [..., H] by its root mean square, times weight [H].

    Raises:
        ValueError: the shapes do not fit, or H exceeds 16384 on CUDA.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be [{x.shape[-1]}] for x {list(x.shape)}")
    if uses_triton(x) and x.shape[-1] > _LARGEST_ROW:
        raise ValueError(f"the kernel takes rows of up to {_LARGEST_ROW}, got {x.shape[-1]}")
    return _rmsnorm(x, weight, eps)
