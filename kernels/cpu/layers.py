"""RMSNorm, rotary embedding and SwiGLU on a CPU in C, one pass over memory each, for fp32.

Each function has the arguments of the one in torch in the layer's file. A row has the same bits
in every batch and on any number of threads.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megadapo.kernels.cpu.native import address, integers, load_native
from megadapo.kernels.launch import count_bytes
from megadapo.kernels.torch_internals import profiled_range

SOURCE = Path(__file__).with_name("layers.c")

RMSNORM, RMSNORM_GRADS = "megadapo::rmsnorm", "megadapo::rmsnorm_grads"
SWIGLU, SWIGLU_GRADS = "megadapo::swiglu", "megadapo::swiglu_grads"
ROTARY = "megadapo::rotary"
"""Names of the C passes in a profile."""

# ROWS_OF_SUM of layers.c
_ROWS_OF_SUM = 64


def implementation(*tensors: Tensor) -> Literal["c", "torch"]:
    """Return which implementation of a layer runs on these tensors."""
    fits = all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors)
    return "c" if fits and load_native(SOURCE) is not None else "torch"


def rmsnorm_c(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return y [R, H] and 1 / rms(x) [R] for a contiguous x [R, H]."""
    y, weight = torch.empty_like(x), weight.contiguous()
    inverse_rms = torch.empty(x.shape[0], dtype=torch.float32)
    inputs = (address(x), address(weight), *integers(*x.shape), ctypes.c_float(eps))
    _run(RMSNORM, (x, y), *inputs, address(y), address(inverse_rms))
    return y, inverse_rms


def rmsnorm_grads_c(
    x: Tensor, weight: Tensor, inverse_rms: Tensor, d_y: Tensor
) -> tuple[Tensor, Tensor]:
    """Return d_x [R, H] and d_weight [H] for contiguous x and d_y [R, H]."""
    d_x, weight = torch.empty_like(x), weight.contiguous()
    d_weights = x.new_empty(-(-x.shape[0] // _ROWS_OF_SUM), x.shape[1])
    inputs = (*map(address, (x, weight, inverse_rms, d_y)), *integers(*x.shape))
    _run(RMSNORM_GRADS, (x, d_y, d_x), *inputs, address(d_x), address(d_weights))
    return d_x, d_weights.sum(0)


def rotate_c(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Return y [T, heads, D] for x with contiguous last dimension, and contiguous cos and sin."""
    y = torch.empty(x.shape, dtype=x.dtype)
    inputs = (address(x), *integers(x.stride(0), x.stride(1)), address(cos), address(sin))
    sizes = (ctypes.c_float(sign), *integers(*x.shape, cos.shape[1]))
    _run(ROTARY, (x, y), *inputs, *sizes, address(y))
    return y


def swiglu_c(gate_up: Tensor) -> Tensor:
    """Return y [R, F] for a contiguous gate_up [R, 2 F]."""
    y = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _run(SWIGLU, (gate_up, y), address(gate_up), *integers(*y.shape), address(y))
    return y


def swiglu_grads_c(gate_up: Tensor, d_y: Tensor) -> Tensor:
    """Return d_gate_up [R, 2 F] for contiguous gate_up [R, 2 F] and d_y [R, F]."""
    d_gate_up = torch.empty_like(gate_up)
    inputs = (address(gate_up), address(d_y), *integers(*d_y.shape))
    _run(SWIGLU_GRADS, (gate_up, d_y, d_gate_up), *inputs, address(d_gate_up))
    return d_gate_up


def _run(name: str, moves: tuple[Tensor, ...], *arguments: object) -> None:
    """Call a C pass on all threads; "megadapo::x" in a profile is `megadapo_x` in C."""
    library = load_native(SOURCE)
    assert library is not None, "call implementation() first"
    count_bytes(name, *moves)
    with profiled_range(name):
        getattr(library, name.replace("::", "_"))(*arguments, torch.get_num_threads())
