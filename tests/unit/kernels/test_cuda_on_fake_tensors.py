"""CUDA's branches of the kernels on tensors without memory: devices of buffers, types of products.

A CPU's torch refuses to copy or differentiate these, so neither the head nor a layer runs whole.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITFunction

from megadapo.kernels import attention, rmsnorm, rotary, swiglu
from megadapo.kernels.policy_head import products as products
from megadapo.trainer.model import megatron_internals

TOKENS, HEADS, SIZE, VOCAB = 40, 2, 16, 256
FP32 = torch.float32


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, set[str]]]:
    """Kernel -> devices of the tensors that it is given; nothing is compiled."""
    seen: dict[str, set[str]] = {}

    def launch(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        seen[kernel.__name__] = {one.device.type for one in tensors}

    monkeypatch.setattr(JITFunction, "run", launch)
    with FakeTensorMode(), torch.no_grad():
        yield seen


def fake(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP32])
def test_kernels_are_launched_on_one_device(launches, dtype):
    x, weight = fake(TOKENS, SIZE, dtype=dtype), fake(SIZE, dtype=dtype)
    y, inverse_rms = rmsnorm._forward_triton(x, weight, 1e-6)
    gradients = rmsnorm._backward_triton(x, weight, inverse_rms, y)
    gate_up = fake(TOKENS, 2 * SIZE, dtype=dtype)
    product = swiglu._forward_triton(gate_up)
    heads = fake(TOKENS, HEADS, SIZE, dtype=dtype)
    turned = rotary._rotate_triton(heads, fake(TOKENS, SIZE // 2), fake(TOKENS, SIZE // 2), 1.0)
    for found, like in (
        *((y, x), (gradients[0], x), (product, x), (turned, heads)),
        (swiglu._backward_triton(gate_up, product), gate_up),
    ):
        assert (found.shape, found.dtype, found.device) == (like.shape, like.dtype, like.device)
    assert len(launches) == 5
    assert all(devices == {"cuda"} for devices in launches.values()), launches


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP32])
@pytest.mark.usefixtures("launches")
def test_products_are_made_in_fp32(dtype):
    hidden, weight = fake(TOKENS, SIZE, dtype=dtype), fake(VOCAB, SIZE, dtype=dtype)
    products.mm_fp32(hidden, weight, out=fake(TOKENS, VOCAB), scratch=None)
    total = products.Fp32Sum(weight.shape, weight)
    total.add(fake(TOKENS, VOCAB, dtype=dtype), hidden)
    assert total.result().dtype == FP32
    assert total.result().device.type == "cuda"


@pytest.mark.usefixtures("launches")
def test_gradient_is_added_without_rounding(monkeypatch):
    """Catches a bf16 product that is rounded before it is added to the fp32 sum."""
    hidden, d_logits = (fake(TOKENS, size, dtype=torch.bfloat16) for size in (SIZE, VOCAB))
    main_grad = fake(VOCAB, SIZE)
    called: dict[str, Any] = {}
    monkeypatch.setattr(torch, "addmm", lambda *args, **how: called.update(how, total=args[0]))
    megatron_internals._add_gradient(hidden, d_logits, main_grad)
    assert called == {"out_dtype": FP32, "out": main_grad, "total": main_grad}


@pytest.mark.parametrize(
    ("dtype", "size", "fits"),
    [(torch.bfloat16, 64, True), (torch.bfloat16, 60, False), (torch.bfloat16, 256, False)]
    + [(FP32, 64, False)],
)
@pytest.mark.usefixtures("launches")
def test_attention_on_a_gpu_is_packed(monkeypatch, dtype, size, fits):
    """Catches padding, groups that torch refuses, and attention to other sequences or later tokens.

    torch's kernel takes fp16 and bf16 and heads of a multiple of 8; elsewhere sequences are padded.
    """
    query, key = (fake(TOKENS, heads, size, dtype=dtype) for heads in (2 * HEADS, HEADS))
    bounds = fake(4, dtype=torch.int32)
    assert attention.should_use_packed_attention(query, key, key, TOKENS) == fits
    if not fits:
        return
    out = attention.packed_attention(query, key, key, bounds, longest=20, scale=0.5)
    assert (out.shape, out.dtype, out.device) == (query.shape, query.dtype, query.device)
    called: dict[str, Any] = {}
    monkeypatch.setattr(attention, "_on_gpu", lambda *args, **how: called.update(how, args=args))
    attention.packed_attention(query, key, key, bounds, longest=20, scale=0.5)
    assert called["window_size"] == (-1, 0) and called["scale"] == 0.5
    assert called["args"] == (query, key, key, bounds, bounds, 20, 20)
