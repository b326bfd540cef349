"""RMSNorm, SwiGLU and rotary against fp64, in C and in torch."""

import pytest
import torch
from torch import Tensor

from megadapo.kernels.cpu import native
from megadapo.kernels.cpu.layers import SOURCE
from megadapo.kernels.rmsnorm import rmsnorm, rmsnorm_definition
from megadapo.kernels.rotary import rotary, rotary_definition
from megadapo.kernels.swiglu import swiglu, swiglu_definition
from tests.support.trainer.layer_checks import check_layer

pytestmark = pytest.mark.usefixtures("passes")

ROWS = [0, 1, 3, 300]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16_grads"])
@pytest.mark.parametrize("size", [63, 128, 1000])
@pytest.mark.parametrize("rows", ROWS)
def test_rmsnorm(rows, size, dtype):
    torch.manual_seed(0)
    x = torch.randn(rows, size, dtype=torch.float64).to(dtype) * 3
    weight = (1 + 0.2 * torch.randn(size)).to(dtype)
    check_layer(
        lambda a, w: rmsnorm(a, w, 1e-5), lambda a, w: rmsnorm_definition(a, w, 1e-5), [x, weight]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16_grads"])
@pytest.mark.parametrize("size", [1, 100, 2500])
@pytest.mark.parametrize("rows", ROWS)
def test_swiglu(rows, size, dtype):
    torch.manual_seed(0)
    check_layer(swiglu, swiglu_definition, [torch.randn(rows, 2 * size).to(dtype) * 4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16_grads"])
@pytest.mark.parametrize("heads, size, rotated", [(1, 8, 8), (5, 64, 64), (12, 24, 20)])
@pytest.mark.parametrize("rows", ROWS)
def test_rotary(rows, heads, size, rotated, dtype):
    torch.manual_seed(0)
    angles = torch.randn(rows, rotated // 2) * 5
    cos, sin = angles.cos(), angles.sin()
    x = torch.randn(rows, heads, size).to(dtype)
    check_layer(lambda a: rotary(a, cos, sin), lambda a: rotary_definition(a, cos, sin), [x])


def test_rotary_of_a_strided_view():
    """Query and key are slices of one projection: strides are not those of a packed tensor."""
    torch.manual_seed(0)
    whole = torch.randn(7, 6, 40)
    angles = torch.randn(7, 8)
    for view in (whole[:, 1:4, :20], whole.transpose(1, 2)[:, :5]):
        got = rotary(view, angles.cos()[:, :2], angles.sin()[:, :2])
        expected = rotary(view.contiguous(), angles.cos()[:, :2], angles.sin()[:, :2])
        assert torch.equal(got, expected)


def test_large_values_do_not_overflow():
    """silu at +-1e4 and rows of 1e18, whose squares leave fp32's range only when summed badly."""
    assert swiglu(torch.tensor([[1e4, -1e4, 2.0, 2.0]])).tolist() == [[2e4, 0.0]]
    row = torch.full((1, 64), 1e15)
    torch.testing.assert_close(rmsnorm(row, torch.ones(64)), torch.ones(1, 64))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_stay_in_their_row(bad):
    torch.manual_seed(0)
    x = torch.randn(3, 48)
    x[1, 5] = bad
    x[1, 29] = bad
    for y in (rmsnorm(x, torch.ones(48)), swiglu(x)):
        assert y.isfinite().all(1).tolist() == [True, False, True]


def test_row_bits_do_not_depend_on_batch_or_threads(set_threads):
    torch.manual_seed(0)
    x, weight, angles = torch.randn(300, 96), torch.rand(96), torch.randn(300, 16)
    heads = torch.randn(300, 3, 32)

    def results(rows: slice) -> list[Tensor]:
        turned = rotary(heads[rows], angles.cos()[rows], angles.sin()[rows])
        return [rmsnorm(x[rows], weight), swiglu(x[rows]), turned]

    whole = results(slice(None))
    set_threads(1)
    for rows in (slice(0, 300), slice(7, 8), slice(100, 165)):
        for part, all_rows in zip(results(rows), whole, strict=True):
            torch.testing.assert_close(part, all_rows[rows], rtol=1e-6, atol=1e-6)
            if native.load_native(SOURCE) is not None:
                assert torch.equal(part, all_rows[rows])


def test_three_dimensions_and_strides():
    torch.manual_seed(0)
    x = torch.randn(5, 4, 32).transpose(0, 1)
    check_layer(rmsnorm, rmsnorm_definition, [x, torch.rand(32)])
    check_layer(swiglu, swiglu_definition, [x])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: rmsnorm(torch.zeros(2, 8), torch.ones(7)), "weight must be"),
        (lambda: swiglu(torch.zeros(2, 7)), "even dimension"),
        (lambda: rotary(torch.zeros(2, 8), torch.zeros(2, 4), torch.zeros(2, 4)), "x must be"),
        (lambda: rotary(torch.zeros(2, 1, 8), torch.zeros(3, 4), torch.zeros(3, 4)), "x must be"),
        (lambda: rotary(torch.zeros(2, 1, 8), torch.zeros(2, 5), torch.zeros(2, 5)), "do not fit"),
    ],
)
def test_bad_shapes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
