"""What the Triton kernel files share: when Triton runs, and in which blocks."""

from __future__ import annotations

import os

# Triton 3.10 changes this default; set, so that results do not change with Triton's version
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from torch import Tensor

_IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Asked once, as `triton.jit` asks when a kernel is defined."""


def uses_triton(tensor: Tensor) -> bool:
    """CUDA always; elsewhere only under Triton's interpreter, which is how its tests run."""
    return _IS_INTERPRETED or tensor.device.type == "cuda"


def block_size(num_columns: int, *, largest: int = 4096, smallest: int = 128) -> int:
    """Columns per step of a row kernel: a power of two that depends on the row's length alone."""
    power: int = triton.next_power_of_2(num_columns)
    return max(smallest, min(largest, power))


def warps_for(block: int, *, largest: int = 8) -> int:
    """Warps for a block of columns: 8 to 16 elements a thread while `largest` allows."""
    return max(1, min(largest, block // 256))
