"""SwiGLU: silu(gate) * up for gate and up beside each other in one tensor, computed in fp32.

Source: Shazeer, "GLU Variants Improve Transformer" (arXiv 2002.05202).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megadapo.kernels.cpu.layers import implementation, swiglu_c, swiglu_grads_c


def swiglu_definition(gate_up: Tensor) -> Tensor:
    """Define the layer: differentiable, in fp32 or wider, rounded once."""
    wide = gate_up if gate_up.dtype == torch.float64 else gate_up.float()
    gate, up = wide.chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


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


_FORWARD = {"c": swiglu_c, "torch": _forward_torch}
_BACKWARD = {"c": swiglu_grads_c, "torch": _backward_torch}


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
