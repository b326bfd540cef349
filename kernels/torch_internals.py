"""Private parts of torch that the kernels use.

Tested with torch 2.11 and 2.13. If another torch has changed or lost one of these, it is detected
here and the callers work without it: slower, never wrong.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import record_function

BRGEMM_SYMBOLS = (
    "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb",
    "_ZN2at6native7cpublas14brgemm_releaseEb",
)
"""C++ names in torch 2.11 to 2.13 of at::native::cpublas::brgemm (bf16 inputs, fp32 result) and
brgemm_release; a name changes with the function's arguments."""

VECTOR_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "lgamma"),
    *("log", "log10", "log1p", "log2", "sin", "sinh", "sqrt", "rsqrt", "tan", "tanh"),
)
"""Functions that torch may leave to MKL's vector library on a CPU."""


def settle_vector_functions() -> None:
    """Call every vector function once, on one thread; call it before a process computes.

    MKL selects the code of such a function at its first call. If several threads make that call at
    once, one of them may get code with errors of 1e-4 for its part (pytorch issue 188792; MKL
    2024.2, which torch 2.11 to 2.13 have). Cosines of positions would be wrong for a whole update.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for name in VECTOR_FUNCTIONS:
            getattr(torch, name)(one)


def use_onednn_products() -> bool:
    """Let oneDNN multiply fp32 matrices in place of MKL; return whether it does, and exactly.

    torch passes an fp32 product to oneDNN only if that may round its inputs to bf16. In a process
    with the environment `processes.ONEDNN_WITHOUT_BF16` it has no kernel that rounds.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # torch swaps the module
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    # a product with the identity adds zeros only; bf16 would keep 8 of 24 bits. torch 2.11 passes
    # no small product to oneDNN
    wide = torch.linspace(-1.0, 1.0, 512 * 512).view(512, 512)
    is_exact = torch.equal(wide @ torch.eye(512), wide)
    if not is_exact:
        matmul.fp32_precision = before
    return is_exact


@dataclass(frozen=True)
class Brgemm:
    """Addresses of oneDNN's small bf16 product inside torch."""

    multiply: ctypes.c_void_p
    release: ctypes.c_void_p


def find_brgemm() -> Brgemm | None:
    """Return the product's addresses; None if this torch or this processor does not have it.

    The processor must have the bf16 instructions; emulated ones are slower than the alternative:
    without the product the head widens its weights, see `policy_head.products.mm_fp32`.
    """
    if not (torch.backends.mkldnn.is_available() and _has_bf16_instructions()):
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return Brgemm(*(ctypes.cast(library[name], ctypes.c_void_p) for name in BRGEMM_SYMBOLS))
    except (OSError, AttributeError):
        return None


def _has_bf16_instructions() -> bool:
    """Return whether oneDNN and the processor support bf16; False if this torch cannot tell."""
    if "ONEDNN_MAX_CPU_ISA" in os.environ:
        return False  # the product would end the process
    try:
        is_supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return bool(is_supported and torch.cpu._is_avx512_bf16_supported())
    except AttributeError:
        return False


def profiled_range(name: str) -> AbstractContextManager[object]:
    """Return a context whose calls are a row of their own in a profile.

    Without a profiler it costs nothing, thanks to a flag of torch; a torch without that flag
    records every range.
    """
    is_profiling = getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    return record_function(name) if is_profiling else nullcontext()
