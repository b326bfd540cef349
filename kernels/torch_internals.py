"""Everything that the kernels use of torch beyond its public interface.

Tried on torch 2.13. A torch that has changed or lost one of these is found out here, and the
callers go on without it: slower, never wrong.
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import record_function

BRGEMM_SYMBOLS = (
    "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb",
    "_ZN2at6native7cpublas14brgemm_releaseEb",
)
"""at::native::cpublas::brgemm for bf16 inputs and an fp32 result, and brgemm_release, by their C++
names in torch 2.13; the names change with the arguments."""


@dataclass(frozen=True)
class Brgemm:
    """Addresses of oneDNN's small bf16 product inside torch."""

    multiply: ctypes.c_void_p
    release: ctypes.c_void_p


def find_brgemm() -> Brgemm | None:
    """The product's addresses; None where this torch or this processor does not have it.

    oneDNN must be willing, and the processor must have the instructions instead of imitating
    them. Without it the head widens its weights: see `policy_head_products.mm_fp32`.
    """
    if not (torch.backends.mkldnn.is_available() and _has_bf16_instructions()):
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return Brgemm(*(ctypes.cast(library[name], ctypes.c_void_p) for name in BRGEMM_SYMBOLS))
    except (OSError, AttributeError):
        return None


def _has_bf16_instructions() -> bool:
    """What torch 2.13 says of oneDNN's and the processor's bf16; False where it does not say."""
    try:
        is_supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return bool(is_supported and torch.cpu._is_avx512_bf16_supported())
    except AttributeError:
        return False


def profiled_range(name: str) -> AbstractContextManager[object]:
    """Show what is called within as a row of its own in a profile.

    Free where no profile is made, which torch 2.13 knows by a flag; a torch without that flag
    pays for every range.
    """
    is_profiling = getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    return record_function(name) if is_profiling else nullcontext()
