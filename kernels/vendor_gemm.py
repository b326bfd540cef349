"""The three matrix products of the policy head, always by the vendor library.

cuBLAS and oneDNN run these shapes at their machine's roofline; what they need from us is an
fp32 result from low-precision inputs, which is spelled differently on each device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def _bf16_products_on_cpu(enabled: bool) -> Iterator[None]:
    """Let oneDNN multiply fp32 tensors that hold exact bf16 values with its bf16 instructions."""
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    if enabled:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def widen_for_logits(tensor: Tensor) -> Tensor:
    """Return the operand of `mm_fp32` in the form this device multiplies fastest."""
    if tensor.device.type == "cpu" and tensor.dtype != torch.float32:
        return tensor.float()
    return tensor


def mm_fp32(a: Tensor, b: Tensor, *, out: Tensor, exact_bf16: bool = False) -> None:
    """out [M, N] fp32 = a [M, K] @ b [K, N], accumulated and stored in fp32.

    `exact_bf16` promises that fp32 operands hold bf16 values, so that multiplying them as bf16
    loses nothing; the CPU has no bf16 product with an fp32 result otherwise.
    """
    if a.dtype == torch.float32:
        with _bf16_products_on_cpu(exact_bf16 and a.device.type == "cpu"):
            torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)


def mm_rows(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out [M, N] = a [M, K] @ b [K, N] in `out`'s dtype, accumulated in fp32 over all of K.

    On CUDA a low-precision product may split K and add the parts in low precision; K is the
    vocabulary here, so the product is made in fp32 and rounded once.
    """
    if a.device.type == "cuda" and a.dtype != torch.float32:
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
        self._is_empty = into is None

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add a^T b, where a is [n, M] and b is [n, N]."""
        if self._is_empty:
            self._sum = torch.empty(self._shape, dtype=torch.float32, device=self._like.device)
        total = self._sum
        assert total is not None
        if a.dtype == torch.float32 and total.dtype == torch.float32:
            torch.addmm(total, a.t(), b, beta=0 if self._is_empty else 1, out=total)
        elif a.device.type == "cuda" and total.dtype == torch.float32:
            if self._is_empty:
                torch.mm(a.t(), b, out_dtype=torch.float32, out=total)
            else:
                torch.addmm(total, a.t(), b, out_dtype=torch.float32, out=total)
        elif self._is_empty:
            total.copy_(torch.mm(a.t(), b))
        else:
            total.add_(torch.mm(a.t(), b))
        self._is_empty = False

    def result(self) -> Tensor:
        """Return the sum [M, N] in fp32; zeros when nothing was added."""
        if self._sum is None:
            self._sum = torch.zeros(self._shape, dtype=torch.float32, device=self._like.device)
        return self._sum
