"""Shared parts of the kernels' launchers: Triton or not, block sizes, and bytes for a profile."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

# Triton 3.10 changes this default; fixed here so that results do not depend on Triton's version
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from torch import Tensor

# triton.jit reads the same flag when it defines a kernel
_IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
_counters: list[Counter[str]] = []


def uses_triton(tensor: Tensor) -> bool:
    """Return whether Triton kernels run on a tensor: on CUDA, and in Triton's interpreter."""
    return _IS_INTERPRETED or tensor.device.type == "cuda"


def block_size(num_columns: int) -> int:
    """Return a row kernel's columns per step: a power of two that depends on the row length."""
    power: int = triton.next_power_of_2(num_columns)
    return max(128, min(4096, power))


def warps_for(block: int) -> int:
    """Return the warps for a block of columns: 8 to 16 elements per thread, at most 8 warps."""
    return max(1, min(8, block // 256))


@contextmanager
def counting_bytes(meter: Counter[str]) -> Iterator[None]:
    """Add the bytes of `count_bytes` in this block to `meter`, by the kernel's name."""
    _counters.append(meter)
    try:
        yield
    finally:
        _counters.remove(meter)


def count_bytes(kernel: str, *tensors: Tensor | None) -> None:
    """Count the bytes of tensors that a launch reads or writes once, for a profile."""
    for meter in _counters:
        meter[kernel] += sum(tensor.nbytes for tensor in tensors if tensor is not None)
