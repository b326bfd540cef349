"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight, statistics in fp32.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467). The
weight's gradient is summed in a fixed order without atomics: the same bits on every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megadapo.kernels.cpu.layers import implementation, rmsnorm_c, rmsnorm_grads_c


def rmsnorm_definition(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Define the layer: differentiable, in fp32 or wider, rounded once."""
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (normed * weight.to(wide.dtype)).to(x.dtype)


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


_FORWARD = {"c": rmsnorm_c, "torch": _forward_torch}
_BACKWARD = {"c": rmsnorm_grads_c, "torch": _backward_torch}


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
        ValueError: the shapes do not fit.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be [{x.shape[-1]}] for x {list(x.shape)}")
    return _rmsnorm(x, weight, eps)
