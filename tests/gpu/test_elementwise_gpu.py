"""RMSNorm, SwiGLU and rotary on a real GPU, at Qwen2.5-32B's widths and at ragged ones."""

import pytest
import torch

from megadapo.kernels.rmsnorm import rmsnorm, rmsnorm_definition
from megadapo.kernels.rotary import rotary, rotary_definition
from megadapo.kernels.swiglu import swiglu, swiglu_definition
from tests.support.trainer.layer_checks import check_layer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, size", [(1, 63), (3, 5120), (1000, 5120), (777, 1000)])
def test_rmsnorm(rows: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, size, device="cuda").to(dtype) * 3
    check_layer(
        rmsnorm, rmsnorm_definition, [x, (1 + 0.2 * torch.randn(size, device="cuda")).to(dtype)]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, size", [(1, 1), (300, 27648), (777, 1000)])
def test_swiglu(rows: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check_layer(
        swiglu, swiglu_definition, [torch.randn(rows, 2 * size, device="cuda").to(dtype) * 4]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, size, rotated", [(1, 8, 8), (40, 128, 128), (12, 96, 64)])
def test_rotary(heads: int, size: int, rotated: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    angles = torch.randn(500, rotated // 2, device="cuda") * 5
    cos, sin = angles.cos(), angles.sin()
    x = torch.randn(500, heads, size, device="cuda").to(dtype)
    check_layer(lambda a: rotary(a, cos, sin), lambda a: rotary_definition(a, cos, sin), [x])
