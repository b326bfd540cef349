"""bf16 products with an fp32 result on the CPU, by the oneDNN kernels that torch has inside.

torch's own operators round such a result to bf16, or multiply at half speed. The kernels are
reached by their C++ names, which change with their arguments: a torch that has others, and a
processor without bf16 instructions, are found out before the first call.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megadapo.kernels.native import load_native

SOURCE = Path(__file__).with_name("policy_head_products.c")

_BRGEMM = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"
_RELEASE = "_ZN2at6native7cpublas14brgemm_releaseEb"


@dataclass(frozen=True)
class _Brgemm:
    library: ctypes.CDLL
    multiply: ctypes.c_void_p
    release: ctypes.c_void_p


def has_fp32_product(a: Tensor, b: Tensor) -> bool:
    """Whether `fp32_product` can multiply a [M, K] by b [N, K]."""
    fits = a.device.type == "cpu" and a.dtype == b.dtype == torch.bfloat16
    # the kernels refuse where oneDNN is switched off, and nothing could catch that
    fits = fits and torch.backends.mkldnn.enabled
    return fits and b.shape[1] % 2 == 0 and b.stride(0) % 2 == 0 and _brgemm() is not None


def fp32_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out [M, N] fp32 = a [M, K] @ b^T for b [N, K], both bf16; rows may be strided."""
    assert a.stride(1) == b.stride(1) == out.stride(1) == 1 and out.dtype == torch.float32
    brgemm = _brgemm()
    assert brgemm is not None, "has_fp32_product comes first"
    sizes = (*a.shape[:1], *b.shape, a.stride(0), b.stride(0), out.stride(0))
    failed = brgemm.library.megadapo_product(
        brgemm.multiply,
        brgemm.release,
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (a, b, out)),
        *map(ctypes.c_int64, sizes),
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("no memory to pack the output weight in")


@functools.cache
def _brgemm() -> _Brgemm | None:
    """The kernels; None where this torch, this processor or the compiler does not have them."""
    if not torch.backends.mkldnn.is_available():
        return None
    # oneDNN must be willing, and the processor must have the instructions instead of imitating them
    has_kernels = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if not (has_kernels and torch.cpu._is_avx512_bf16_supported()):
        return None
    library = load_native(SOURCE)
    if library is None:
        return None
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        functions = [ctypes.cast(torch_cpu[name], ctypes.c_void_p) for name in (_BRGEMM, _RELEASE)]
    except (OSError, AttributeError):
        return None
    return _Brgemm(library, *functions)
