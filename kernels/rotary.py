"""Rotary position embedding, halves rotated: (a, b) -> (a cos - b sin, b cos + a sin).

Source: Su et al., "RoFormer" (arXiv 2104.09864), in the half-split form of Llama and Qwen. The
backward pass is the rotation by the opposite angle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megadapo.kernels.cpu.layers import implementation, rotate_c
from megadapo.kernels.launch import count_bytes


def rotary_definition(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Define the layer: differentiable, in fp32 or wider, rounded once."""
    wide = x if x.dtype == torch.float64 else x.float()
    half = cos.shape[-1]
    cos, sin = cos[:, None].to(wide.dtype), sin[:, None].to(wide.dtype)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], x[..., 2 * half :]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(x.dtype), rest], dim=-1)


@triton.jit
def rotary_kernel(
    X: tl.tensor,  # [T, heads, D], last dimension contiguous
    COS: tl.tensor,  # [T, D_rotary / 2]
    SIN: tl.tensor,
    Y: tl.tensor,  # [T, heads, D] contiguous
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    num_heads: tl.tensor,
    head_size: tl.tensor,
    half: tl.tensor,
    sign: tl.tensor,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    columns = tl.arange(0, BLOCK_HALF)[None, :]
    angle = token * half + columns
    cos = tl.load(COS + angle, mask=columns < half, other=0.0).to(tl.float32)
    sin = tl.load(SIN + angle, mask=columns < half, other=0.0).to(tl.float32) * sign
    inside = (heads < num_heads) & (columns < half)
    source = X + token * token_stride + heads * head_stride
    destination = Y + (token * num_heads + heads) * head_size
    first = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half + columns, mask=inside, other=0.0).to(tl.float32)
    dtype = Y.dtype.element_ty
    tl.store(destination + columns, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(destination + half + columns, (second * cos + first * sin).to(dtype), mask=inside)
    if BLOCK_REST > 0:
        rest = 2 * half + tl.arange(0, BLOCK_REST)[None, :]
        inside = (heads < num_heads) & (rest < head_size)
        tl.store(destination + rest, tl.load(source + rest, mask=inside), mask=inside)


def _rotate_triton(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    num_tokens, num_heads, head_size = x.shape
    half = cos.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rest = head_size - 2 * half
    block_heads = min(8, triton.next_power_of_2(num_heads))
    if y.numel():
        rotary_kernel[(num_tokens, triton.cdiv(num_heads, block_heads))](
            X=x,
            COS=cos,
            SIN=sin,
            Y=y,
            token_stride=x.stride(0),
            head_stride=x.stride(1),
            num_heads=num_heads,
            head_size=head_size,
            half=half,
            sign=sign,
            BLOCK_HEADS=block_heads,
            BLOCK_HALF=triton.next_power_of_2(half),
            BLOCK_REST=triton.next_power_of_2(rest) if rest else 0,
            num_warps=4,
        )
        count_bytes(rotary_kernel.__name__, x, y)
    return y


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


_ROTATE = {"triton": _rotate_triton, "c": rotate_c, "torch": _rotate_torch}


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
