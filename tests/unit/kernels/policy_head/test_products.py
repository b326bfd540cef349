"""The head's bf16 products with fp32 results on a CPU: by torch's inner kernels, and widened."""

import pytest
import torch

from megadapo.kernels.cpu import native
from megadapo.kernels.policy_head.products import (
    has_fp32_product,
    load_product,
    mm_fp32,
    mm_fp32_scratch,
)
from megadapo.kernels.torch_internals import find_brgemm

ROUTES = ["widened"]
if find_brgemm() is not None:
    ROUTES.append("inner kernels")


@pytest.fixture(params=ROUTES)
def route(request, monkeypatch, fresh_native):
    """Select one way; a processor without bf16 instructions has only the first."""
    monkeypatch.setenv(native.SWITCH, "1" if request.param == "inner kernels" else "0")
    load_product.cache_clear()
    assert (load_product() is not None) == (request.param == "inner kernels")
    yield request.param
    load_product.cache_clear()


def product(a, b, out=None):
    out = torch.full((len(a), len(b)), torch.nan) if out is None else out
    scratch = mm_fp32_scratch(b)
    mm_fp32(a if scratch is None else a.float(), b, out=out, scratch=scratch)
    return out


def operands(rows, columns, inner):
    return torch.randn(rows, inner).bfloat16(), torch.randn(columns, inner).bfloat16()


@pytest.mark.parametrize("rows", [1, 15, 64, 65, 300])
@pytest.mark.parametrize("columns", [1, 17, 64, 129, 1000])
@pytest.mark.parametrize("inner", [1, 2, 30, 33, 896])
def test_all_product_shapes_match_fp64(route, rows, columns, inner):
    """Blocks have ends, and an odd length has half a pair; bf16 results would be off by 1e-3."""
    a, b = operands(rows, columns, inner)
    exact = a.double() @ b.double().t()
    scale = a.double().abs() @ b.double().abs().t()
    assert ((product(a, b).double() - exact).abs() <= 1e-6 * scale + 1e-30).all()


def test_product_bits_do_not_depend_on_tile_split_or_threads(route, set_threads):
    """Widened only for multiples of 64 rows, as tiles are: oneDNN has another path for others."""
    a, b = operands(256, 512, 128)
    whole = product(a, b)
    for num_threads in (1, 2, 3):
        set_threads(num_threads)
        assert torch.equal(product(a, b), whole)
        assert torch.equal(product(a[64:192], b), whole[64:192])
        if route == "inner kernels":
            assert torch.equal(product(a[5:78], b[33:300]), whole[5:78, 33:300])


def test_strided_operands_and_a_slice_of_the_result(route):
    """The result is a column slice of the tile; weights may be a slice of a wider matrix."""
    wide = torch.randn(70, 200).bfloat16()
    a, b = operands(40, 70, 64)
    b = wide[:, :64]
    tile = torch.zeros(40, 300)
    product(a, b, out=tile[:, 100:170])
    torch.testing.assert_close(
        tile[:, 100:170].double(), a.double() @ b.double().t(), rtol=0, atol=1e-4
    )
    assert (tile[:, :100] == 0).all() and (tile[:, 170:] == 0).all()


def test_no_inner_product_without_onednn():
    """The kernels would throw an exception that cannot be caught."""
    a, b = operands(8, 8, 8)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not has_fp32_product(a, b)
        assert product(a, b).isfinite().all()
