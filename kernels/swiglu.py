"""SwiGLU: silu(gate) * up for gate and up beside each other in one tensor, computed in fp32.

Source: Shazeer, "GLU Variants Improve Transformer" (arXiv 2002.05202).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from triton.runtime.jit import JITFunction

from megadapo.kernels.cpu.layers import implementation, swiglu_c, swiglu_grads_c
from megadapo.kernels.launch import block_size, count_bytes, warps_for


def swiglu_definition(gate_up: Tensor) -> Tensor:
    """Define the layer: differentiable, in fp32 or wider, rounded once."""
    wide = gate_up if gate_up.dtype == torch.float64 else gate_up.float()
    gate, up = wide.chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


@triton.jit
def swiglu_fwd_kernel(
    GATE_UP: tl.tensor, Y: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    at = GATE_UP + row * 2 * size + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + size, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(Y + row * size + columns, y.to(Y.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_bwd_kernel(
    GATE_UP: tl.tensor, D_Y: tl.tensor, D_GATE_UP: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    offset = row * 2 * size + columns
    gate = tl.load(GATE_UP + offset, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(GATE_UP + offset + size, mask=inside, other=0.0).to(tl.float32)
    d_y = tl.load(D_Y + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    d_gate = d_y * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    d_up = d_y * gate * sigmoid
    out = D_GATE_UP + offset
    tl.store(out, d_gate.to(D_GATE_UP.dtype.element_ty), mask=inside)
    tl.store(out + size, d_up.to(D_GATE_UP.dtype.element_ty), mask=inside)


def _launch(kernel: JITFunction[Any], num_rows: int, size: int, **tensors: Tensor) -> None:
    block = block_size(size, largest=2048)
    if num_rows:
        grid = (num_rows, triton.cdiv(size, block))
        kernel[grid](**tensors, size=size, BLOCK=block, num_warps=warps_for(block))
        count_bytes(kernel.__name__, *tensors.values())


def _forward_triton(gate_up: Tensor) -> Tensor:
    y = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _launch(swiglu_fwd_kernel, *y.shape, GATE_UP=gate_up, Y=y)
    return y


def _backward_triton(gate_up: Tensor, d_y: Tensor) -> Tensor:
    d_gate_up = torch.empty_like(gate_up)
    _launch(swiglu_bwd_kernel, *d_y.shape, GATE_UP=gate_up, D_Y=d_y, D_GATE_UP=d_gate_up)
    return d_gate_up


def _forward_torch(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return functional.silu(gate).mul_(up).to(gate_up.dtype)


def _backward_torch(gate_up: Tensor, d_y: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    d_y = d_y.float()
    d_gate_up = torch.empty_like(gate_up, dtype=torch.float32)
    d_gate, d_up = d_gate_up.chunk(2, dim=-1)
    torch.mul(functional.silu(gate), d_y, out=d_up)
    torch.mul(d_y, up, out=d_gate)
    torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
    return d_gate_up.to(gate_up.dtype)


_FORWARD = {"triton": _forward_triton, "c": swiglu_c, "torch": _forward_torch}
_BACKWARD = {"triton": _backward_triton, "c": swiglu_grads_c, "torch": _backward_torch}


class _SwiGLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        rows = gate_up.reshape(-1, gate_up.shape[-1]).contiguous()
        ctx.save_for_backward(rows)
        y = _FORWARD[implementation(rows)](rows)
        return y.view(*gate_up.shape[:-1], gate_up.shape[-1] // 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        d_rows = d_y.reshape(rows.shape[0], rows.shape[1] // 2).contiguous()
        return _BACKWARD[implementation(rows, d_rows)](rows, d_rows).view(
            *d_y.shape[:-1], rows.shape[1]
        )


_swiglu: Callable[[Tensor], Tensor] = _SwiGLUFunction.apply


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [..., F] for gate_up [..., 2 F], gate first.

    Raises:
        ValueError: the last dimension is odd.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up must end in an even dimension, got {list(gate_up.shape)}")
    return _swiglu(gate_up)
