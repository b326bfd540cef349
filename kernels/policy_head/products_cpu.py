"""bf16 products with an fp32 result on the CPU, by the oneDNN kernels that torch has inside.

torch's own operators round such a result to bf16, or multiply at half speed. Where this torch,
this processor or the C compiler does not have what it takes, that is known before the first call.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megadapo.kernels.cpu.native import address, integers, load_native
from megadapo.kernels.torch_internals import Brgemm, find_brgemm

SOURCE = Path(__file__).parents[1] / "cpu" / "policy_head_products.c"

logger = logging.getLogger(__name__)


def has_fp32_product(a: Tensor, b: Tensor) -> bool:
    """Whether `fp32_product` can multiply a [M, K] by b [N, K]."""
    fits = a.device.type == "cpu" and a.dtype == b.dtype == torch.bfloat16
    # the kernels refuse where oneDNN is switched off, and nothing could catch that
    fits = fits and bool(torch.backends.mkldnn.enabled)
    return fits and b.shape[1] % 2 == 0 and b.stride(0) % 2 == 0 and load_product() is not None


def fp32_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out [M, N] fp32 = a [M, K] @ b^T for b [N, K], both bf16; rows may be strided."""
    product = load_product()
    assert product is not None, "has_fp32_product comes first"
    product(a, b, out)


@dataclass(frozen=True)
class _Product:
    library: ctypes.CDLL
    brgemm: Brgemm

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
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
            raise MemoryError("no memory to pack the output weight in")


@functools.cache
def load_product() -> _Product | None:
    """The product, tried once on small integers; None where it cannot be had."""
    brgemm = find_brgemm()
    library = None if brgemm is None else load_native(SOURCE)
    if brgemm is None or library is None:
        return None
    product = _Product(library, brgemm)
    if not _is_right(product):
        logger.warning("torch %s multiplies bf16 in a way we do not know", torch.__version__)
        return None
    return product


def _is_right(product: _Product) -> bool:
    """Whether integers, whose products are exact, come out as they must."""
    a = torch.arange(6.0).view(3, 2).bfloat16()
    b = torch.arange(34.0).view(17, 2).bfloat16()
    out = torch.full((3, 17), torch.nan)
    product(a, b, out)
    return torch.equal(out, a.float() @ b.float().t())
