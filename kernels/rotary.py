"""Rotary position embedding, halves rotated: (a, b) -> (a cos - b sin, b cos + a sin).

Source: Su et al., "RoFormer" (arXiv 2104.09864), in the half-split form of Llama and Qwen. The
backward pass is the rotation by the opposite angle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megadapo.kernels.cpu.layers import implementation, rotate_c


def rotary_definition(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Define the layer: differentiable, in fp32 or wider, rounded once."""
    wide = x if x.dtype == torch.float64 else x.float()
    half = cos.shape[-1]
    cos, sin = cos[:, None].to(wide.dtype), sin[:, None].to(wide.dtype)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], x[..., 2 * half :]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(x.dtype), rest], dim=-1)


def _rotate_torch(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    size = 2 * cos.shape[-1]
    cos, sin = cos.float(), sin.float() * sign
    turned, rest = x[..., :size].float(), x[..., size:]
    # both halves in one kernel: one pass over all memory is cheaper than two strided ones
    first, second = turned.chunk(2, dim=-1)
    swapped = torch.cat([second, first], dim=-1)
    y = turned * torch.cat([cos, cos], dim=-1)[:, None]
    y.addcmul_(swapped, torch.cat([-sin, sin], dim=-1)[:, None])
    y = y.to(x.dtype)
    return torch.cat([y, rest], dim=-1) if rest.shape[-1] else y


_ROTATE = {"c": rotate_c, "torch": _rotate_torch}


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(d_y, cos, sin, -1.0), None, None


_rotary: Callable[[Tensor, Tensor, Tensor], Tensor] = _Rotary.apply


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    if x.stride(-1) != 1:
        x = x.contiguous()
    return _ROTATE[implementation(x, cos, sin)](x, cos, sin, sign)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, D] by each token's angles; cos and sin are [T, D_rotary / 2].

    Columns from D_rotary on stay as they are.

    Raises:
        ValueError: the shapes do not fit.
    """
    if x.dim() != 3 or cos.shape != sin.shape or cos.dim() != 2 or cos.shape[0] != x.shape[0]:
        raise ValueError(
            f"x must be [T, heads, D] and cos, sin [T, D / 2]; got {list(x.shape)}, "
            f"{list(cos.shape)} and {list(sin.shape)}"
        )
    if 2 * cos.shape[1] > x.shape[2]:
        raise ValueError(f"{2 * cos.shape[1]} rotated columns do not fit heads of {x.shape[2]}")
    return _rotary(x, cos.contiguous(), sin.contiguous())
