"""RMSNorm, rotary embedding and SwiGLU on a CPU in C, one pass over memory each, for fp32.

Each function has the arguments of the Triton launcher in the layer's file. A row has the same bits
in every batch and on any number of threads.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megadapo.kernels.cpu.native import address, integers, load_native
from megadapo.kernels.launch import moved, uses_triton
from megadapo.kernels.torch_internals import profiled_range

SOURCE = Path(__file__).with_name("layers.c")

RMSNORM, RMSNORM_GRADS = "megadapo::rmsnorm", "megadapo::rmsnorm_grads"
SWIGLU, SWIGLU_GRADS = "megadapo::swiglu", "megadapo::swiglu_grads"
ROTARY = "megadapo::rotary"
"""Names of the C passes in a profile."""

# ROWS_OF_SUM of layers.c
_ROWS_OF_SUM = 64


def implementation(*tensors: Tensor) -> Literal["triton", "c", "torch"]:
    """Return which implementation of a layer runs on these tensors."""
    if uses_triton(tensors[0]):
        return "triton"
    fits = all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors)
    return "c" if fits and load_native(SOURCE) is not None else "torch"


def rmsnorm_c(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return y [R, H] and 1 / rms(x) [R] for a contiguous x [R, H]."""
    y = torch.empty_like(x)
    inverse_rms = torch.empty(x.shape[0], dtype=torch.float32)
    weight = weight.contiguous()
    moved(RMSNORM, x, y)
    with profiled_range(RMSNORM):
        _library().megadapo_rmsnorm(
            *(address(x), address(weight), *integers(*x.shape), ctypes.c_float(eps)),
            *(address(y), address(inverse_rms), torch.get_num_threads()),
        )
    return y, inverse_rms


def rmsnorm_grads_c(
    x: Tensor, weight: Tensor, inverse_rms: Tensor, d_y: Tensor
) -> tuple[Tensor, Tensor]:
    """Return d_x [R, H] and d_weight [H] for contiguous x and d_y [R, H]."""
    d_x, weight = torch.empty_like(x), weight.contiguous()
    d_weights = x.new_empty(-(-x.shape[0] // _ROWS_OF_SUM), x.shape[1])
    moved(RMSNORM_GRADS, x, d_y, d_x)
    with profiled_range(RMSNORM_GRADS):
        _library().megadapo_rmsnorm_grads(
            *map(address, (x, weight, inverse_rms, d_y)),
            *(*integers(*x.shape), address(d_x), address(d_weights), torch.get_num_threads()),
        )
    return d_x, d_weights.sum(0)


def rotate_c(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Return y [T, heads, D] for x with contiguous last dimension, and contiguous cos and sin."""
    num_tokens, num_heads, size = x.shape
    y = torch.empty(x.shape, dtype=x.dtype)
    moved(ROTARY, x, y)
    with profiled_range(ROTARY):
        _library().megadapo_rotary(
            *(address(x), *integers(x.stride(0), x.stride(1)), address(cos), address(sin)),
            *(ctypes.c_float(sign), *integers(num_tokens, num_heads, size, cos.shape[1])),
            *(address(y), torch.get_num_threads()),
        )
    return y


def swiglu_c(gate_up: Tensor) -> Tensor:
    """Return y [R, F] for a contiguous gate_up [R, 2 F]."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(num_rows, size)
    moved(SWIGLU, gate_up, y)
    with profiled_range(SWIGLU):
        _library().megadapo_swiglu(
            *(address(gate_up), *integers(num_rows, size), address(y), torch.get_num_threads())
        )
    return y


def swiglu_grads_c(gate_up: Tensor, d_y: Tensor) -> Tensor:
    """Return d_gate_up [R, 2 F] for contiguous gate_up [R, 2 F] and d_y [R, F]."""
    d_gate_up = torch.empty_like(gate_up)
    moved(SWIGLU_GRADS, gate_up, d_y, d_gate_up)
    with profiled_range(SWIGLU_GRADS):
        _library().megadapo_swiglu_grads(
            *(address(gate_up), address(d_y), *integers(*d_y.shape), address(d_gate_up)),
            torch.get_num_threads(),
        )
    return d_gate_up


def _library() -> ctypes.CDLL:
    library = load_native(SOURCE)
    assert library is not None, "call implementation() first"
    return library
