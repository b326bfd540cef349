"""Comparison of a layer with its definition, shared by CPU and GPU tests."""

from collections.abc import Callable

import torch
from torch import Tensor


def values_and_grads(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Return output and gradients of all inputs for an upstream gradient that is not constant."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    y = function(*inputs)
    upstream = torch.linspace(-1, 2, y.numel(), dtype=torch.float64, device=y.device)
    y.backward(upstream.view(y.shape).to(y.dtype))
    return [y.detach(), *(x.grad for x in inputs)]


def check_layer(
    function: Callable[..., Tensor], definition: Callable[..., Tensor], inputs: list[Tensor]
) -> None:
    """Compare with fp64: fp32 within rounding, bf16 within one rounding of each result."""
    got = values_and_grads(function, inputs)
    expected = values_and_grads(definition, [x.double() for x in inputs])
    relative = 2e-6 if inputs[0].dtype == torch.float32 else 4e-3
    for value, truth in zip(got, expected, strict=True):
        assert value.shape == truth.shape
        error = (value.double() - truth).norm()
        assert error <= relative * truth.norm() + 1e-30
