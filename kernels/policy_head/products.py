"""The three matrix products of the policy head, always by the vendor library.

cuBLAS and oneDNN run these shapes at their machine's roofline; what they need from us is an
fp32 result from low-precision inputs, which is spelled differently on each device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megadapo.kernels.policy_head.products_cpu import fp32_product, has_fp32_product

FEW_ROWS = 128
"""Rows up to which the CPU's libraries may take a path without blocks of K, on any thread."""
K_PIECE = 4096
"""Terms that fp32 adds one by one with an error below 1e-6."""


@contextmanager
def _bf16_products_on_cpu(enabled: bool) -> Iterator[None]:
    """Let oneDNN multiply fp32 tensors that hold exact bf16 values with its bf16 instructions."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # torch swaps the module
    before = matmul.fp32_precision
    if enabled:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def widened_like(b: Tensor) -> Tensor | None:
    """Scratch for `mm_fp32` where the device has no low-precision product with an fp32 result."""
    if b.device.type == "cpu" and b.dtype != torch.float32 and not has_fp32_product(b, b):
        return torch.empty(b.shape, dtype=torch.float32)
    return None


def mm_fp32(a: Tensor, b: Tensor, *, out: Tensor, scratch: Tensor | None) -> None:
    """out [M, N] fp32 = a [M, K] @ b^T for b [N, K], accumulated and stored in fp32.

    Where a CPU has no such product b is widened into `scratch` and a comes in widened. Such fp32
    values are exact, so oneDNN may multiply them with its bf16 instructions again, and only the
    rounding of the result is gone.
    """
    if scratch is not None:
        with _bf16_products_on_cpu(b.dtype == torch.bfloat16):
            torch.mm(a, scratch.copy_(b).t(), out=out)
    elif a.dtype == torch.float32:
        torch.mm(a, b.t(), out=out)
    elif a.device.type == "cpu":
        fp32_product(a, b, out)
    else:
        torch.mm(a, b.t(), out_dtype=torch.float32, out=out)


def mm_rows(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out [M, N] = a [M, K] @ b [K, N] in `out`'s dtype, accumulated in fp32 over all of K.

    On CUDA a low-precision product may split K and add the parts in low precision; K is the
    vocabulary here, so the product is made in fp32 and rounded once. On the CPU a product of few
    rows adds all of K one by one, which costs a digit at 130,000 terms: it is made in pieces.
    """
    if a.device.type == "cpu" and a.dtype == torch.float32 and len(a) <= FEW_ROWS:
        torch.mm(a[:, :K_PIECE], b[:K_PIECE], out=out)
        for start in range(K_PIECE, a.shape[1], K_PIECE):
            piece = slice(start, start + K_PIECE)
            # not addmm, which would go on adding to the sum one by one
            out.add_(torch.mm(a[:, piece], b[piece]))
    elif a.device.type == "cuda" and a.dtype != torch.float32:
        out.copy_(torch.mm(a, b, out_dtype=torch.float32))
    else:
        torch.mm(a, b, out=out)


class Fp32Sum:
    """A sum of products a^T b over token blocks, kept in fp32 whatever the inputs' dtype.

    Writes into `into` (Megatron's main_grad) where given, else into a buffer of its own whose
    first block overwrites it, so that it is never zeroed.
    """

    def __init__(self, shape: torch.Size, like: Tensor, into: Tensor | None = None) -> None:
        self._shape = shape
        self._like = like
        self._sum = into
        self._is_own = into is None

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add a^T b, where a is [n, M] and b is [n, N]."""
        if self._sum is None:
            self._sum = self._first(a, b)
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

    def _first(self, a: Tensor, b: Tensor) -> Tensor:
        if a.device.type == "cuda" and a.dtype != torch.float32:
            return torch.mm(a.t(), b, out_dtype=torch.float32)
        # on the CPU a low-precision product is widened once there is a second one to add
        return torch.mm(a.t(), b)

    def result(self) -> Tensor:
        """Return the sum [M, N]; zeros when nothing was added."""
        if self._sum is None:
            self._sum = torch.zeros(self._shape, dtype=torch.float32, device=self._like.device)
        return self._sum
