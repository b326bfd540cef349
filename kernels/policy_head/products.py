"""Matrix products of the policy head with fp32 results, by the vendor libraries.

cuBLAS and oneDNN run these shapes at their machine's roofline. An fp32 result from low-precision
inputs needs a different call on each device. On the CPU, torch's own operators round such a result
to bf16 or multiply at half speed, so `load_product` calls the oneDNN kernel inside torch directly.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megadapo.kernels.cpu.native import address, integers, load_native
from megadapo.kernels.torch_internals import Brgemm, find_brgemm

SOURCE = Path(__file__).parents[1] / "cpu" / "policy_head_products.c"

FEW_ROWS = 128
"""Rows of a product up to which a CPU library may add all K terms one by one."""
K_PIECE = 4096
"""Largest number of terms that fp32 can add one by one with an error below 1e-6."""

logger = logging.getLogger(__name__)


@contextmanager
def _bf16_products_on_cpu(enabled: bool) -> Iterator[None]:
    """Let oneDNN multiply fp32 tensors of exact bf16 values with its bf16 instructions."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # torch swaps the module
    before = matmul.fp32_precision
    if enabled:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@contextmanager
def _sums_in_fp32_on_cuda() -> Iterator[None]:
    """Let cuBLAS split a long sum only into parts that it adds in fp32."""
    matmul = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = [(getattr(matmul, name), getattr(matmul, f"{name}_split_k")) for name in names]
    for name, (_, may_split) in zip(names, before, strict=True):
        setattr(matmul, name, (False, may_split))
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(matmul, name, value)


def mm_fp32_scratch(b: Tensor) -> Tensor | None:
    """Return the scratch of `mm_fp32` for b; None if the device has a product with fp32 result."""
    if b.device.type == "cpu" and b.dtype != torch.float32 and not has_fp32_product(b, b):
        return torch.empty(b.shape, dtype=torch.float32)
    return None


def mm_fp32(a: Tensor, b: Tensor, *, out: Tensor, scratch: Tensor | None) -> None:
    """Write out [M, N] fp32 = a [M, K] @ b^T for b [N, K], accumulated in fp32.

    With `scratch` (see `mm_fp32_scratch`) b is widened into it, and a must already be widened. Such
    fp32 values are exact, so oneDNN may still use its bf16 instructions; only the rounding of the
    result is gone.
    """
    if scratch is not None:
        with _bf16_products_on_cpu(b.dtype == torch.bfloat16):
            torch.mm(a, scratch.copy_(b).t(), out=out)
    elif a.dtype == torch.float32:
        torch.mm(a, b.t(), out=out)
    elif a.device.type == "cpu":
        product = load_product()
        assert product is not None, "mm_fp32_scratch returns scratch without a product"
        product(a, b, out)
    else:
        torch.mm(a, b.t(), out_dtype=torch.float32, out=out)


def mm_rows(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """Write out [M, N] = a [M, K] @ b [K, N] in `out`'s dtype, accumulated in fp32 over all of K.

    K is the vocabulary. On CUDA a low-precision product may split it and add the parts in low
    precision, which is forbidden here: the result is rounded once. On the CPU a product of few rows
    adds all of K one by one, which loses a digit at 130,000 terms: it is made in pieces.
    """
    if a.device.type == "cpu" and a.dtype == torch.float32 and len(a) <= FEW_ROWS:
        torch.mm(a[:, :K_PIECE], b[:K_PIECE], out=out)
        for start in range(K_PIECE, a.shape[1], K_PIECE):
            piece = slice(start, start + K_PIECE)
            # addmm would add the piece's terms to the running sum one by one
            out.add_(torch.mm(a[:, piece], b[piece]))
    elif a.device.type == "cuda":
        with _sums_in_fp32_on_cuda():
            torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out=out)


class Fp32Sum:
    """A sum of products a^T b over token blocks, in fp32 for inputs of any dtype.

    The sum is added to `into` (Megatron's main_grad) if given. Otherwise the first block
    overwrites a new buffer, which needs no zeroing.
    """

    def __init__(self, shape: torch.Size, like: Tensor, into: Tensor | None = None) -> None:
        self._shape = shape
        self._like = like
        self._sum = into
        self._is_own = into is None

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add a^T b for a [n, M] and b [n, N]."""
        if self._sum is None:
            if a.device.type == "cuda" and a.dtype != torch.float32:
                self._sum = torch.mm(a.t(), b, out_dtype=torch.float32)
            else:
                # on the CPU a low-precision product is widened only if a second one is added
                self._sum = torch.mm(a.t(), b)
            return
        if self._is_own and self._sum.dtype != torch.float32:
            self._sum = self._sum.float()
        total = self._sum
        if a.dtype == total.dtype == torch.float32:
            torch.addmm(total, a.t(), b, out=total)
        elif a.device.type == "cuda" and total.dtype == torch.float32:
            torch.addmm(total, a.t(), b, out_dtype=torch.float32, out=total)
        else:
            total.add_(torch.mm(a.t(), b))

    def result(self) -> Tensor:
        """Return the sum [M, N]; zeros if nothing was added."""
        if self._sum is None:
            self._sum = torch.zeros(self._shape, dtype=torch.float32, device=self._like.device)
        return self._sum


@dataclass(frozen=True)
class Fp32Product:
    """A bf16 product on the CPU with an fp32 result; rows may be strided."""

    library: ctypes.CDLL
    brgemm: Brgemm

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Write out [M, N] fp32 = a [M, K] @ b^T for b [N, K], both bf16."""
        assert a.stride(1) == b.stride(1) == out.stride(1) == 1 and out.dtype == torch.float32
        sizes = (*a.shape[:1], *b.shape, a.stride(0), b.stride(0), out.stride(0))
        failed = self.library.megadapo_product(
            self.brgemm.multiply,
            self.brgemm.release,
            *map(address, (a, b, out)),
            *integers(*sizes),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("out of memory for a packed copy of the output weight")


def has_fp32_product(a: Tensor, b: Tensor) -> bool:
    """Return whether `load_product` can multiply a [M, K] by b [N, K]."""
    fits = a.device.type == "cpu" and a.dtype == b.dtype == torch.bfloat16
    # the kernels abort the process if oneDNN is switched off
    fits = fits and bool(torch.backends.mkldnn.enabled)
    return fits and b.shape[1] % 2 == 0 and b.stride(0) % 2 == 0 and load_product() is not None


@functools.cache
def load_product() -> Fp32Product | None:
    """Load the product and test it; None if torch, the processor or the compiler lacks it."""
    brgemm = find_brgemm()
    library = None if brgemm is None else load_native(SOURCE)
    if brgemm is None or library is None:
        return None
    product = Fp32Product(library, brgemm)
    # products of small integers are exact
    a = torch.arange(6.0).view(3, 2).bfloat16()
    b = torch.arange(34.0).view(17, 2).bfloat16()
    out = torch.full((3, 17), torch.nan)
    product(a, b, out)
    if not torch.equal(out, a.float() @ b.float().t()):
        logger.warning(
            "the bf16 product inside torch %s gives wrong results: using a slower one",
            torch.__version__,
        )
        return None
    return product
