"""What the Triton kernel files share: when Triton runs, and how a kernel is compiled alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

# Triton 3.10 changes this default; set, so that results do not change with Triton's version
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from torch import Tensor
from triton.runtime.jit import JITFunction


def uses_triton(tensor: Tensor) -> bool:
    """CUDA always; elsewhere only under Triton's interpreter, which is how its tests run."""
    return tensor.device.type == "cuda" or triton.knobs.runtime.interpret


def block_size(num_columns: int, *, largest: int = 4096, smallest: int = 128) -> int:
    """Columns per step of a row kernel: a power of two that depends on the row's length alone."""
    return max(smallest, min(largest, triton.next_power_of_2(num_columns)))


def warps_for(block: int, *, largest: int = 8) -> int:
    """Warps for a block of columns: 8 to 16 elements a thread while `largest` allows."""
    return max(1, min(largest, block // 256))


@dataclass(frozen=True, kw_only=True)
class CompileCase:
    """One specialisation of a kernel at a model's shapes, enough to compile it without a GPU."""

    kernel: JITFunction
    label: str
    """The shapes in words."""
    values: Mapping[str, str | int]
    """Each run-time argument: a Triton type such as "*fp32" or "fp32", or an integer's value."""
    constants: Mapping[str, int | bool] = field(default_factory=dict)
    num_warps: int = 4

    def signature(self) -> dict[str, str]:
        """Triton's signature: integers by width, constants named as such."""
        types = {
            name: value if isinstance(value, str) else ("i32" if value < 2**31 else "i64")
            for name, value in self.values.items()
        }
        types |= dict.fromkeys(self.constants, "constexpr")
        return {name: types[name] for name in self.kernel.arg_names}

    def attributes(self) -> dict[tuple[int, ...], list[list[str | int]]]:
        """What a launch would know: pointers and integers that 16 divides."""
        names = self.kernel.arg_names
        aligned = [
            name
            for name, value in self.values.items()
            if (isinstance(value, str) and value.startswith("*"))
            or (isinstance(value, int) and value % 16 == 0)
        ]
        return {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
