"""CUDA's branches of the kernels on tensors without memory: devices of buffers, types of products.

A CPU build of torch refuses to slice or copy these: there neither the head nor a layer runs whole.
A CUDA build needs no GPU for it.
"""

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from megadapo.algorithm.objective import PolicyObjective
from megadapo.kernels import attention
from megadapo.kernels.policy_head import products as products
from megadapo.kernels.policy_head.head import _PolicyHeadFunction
from megadapo.kernels.policy_head.tiles import PolicyInputs
from megadapo.kernels.policy_head.tiling import HeadOptions, plan_call
from megadapo.lab.profiling.profiles import bytes_moved
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
@pytest.mark.usefixtures("launches")
def test_products_are_made_in_fp32(dtype):
    hidden, weight = fake(TOKENS, SIZE, dtype=dtype), fake(VOCAB, SIZE, dtype=dtype)
    products.mm_fp32(hidden, weight, out=fake(TOKENS, VOCAB), scratch=None)
    products.mm_rows(fake(TOKENS, VOCAB, dtype=dtype), weight, out=fake(TOKENS, SIZE, dtype=dtype))
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
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


class _Calls(TorchDispatchMode):
    """Counts operators by name, and stands in for one that fake tensors do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func._schema.name] += 1
        if func is torch.ops.aten.mm.out and args[0].dtype != FP32:
            assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        if func is torch.ops.aten.addmm.dtype_out:
            assert kwargs["out"] is args[0] and args[0].dtype == FP32
            return kwargs["out"]
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a CUDA build of torch")
@pytest.mark.parametrize(
    ("options", "num_logits", "weight_pass", "weight_bytes"),
    [
        pytest.param({}, 8, {"aten::mul"}, 6, id="bits"),
        pytest.param({"tp_invariant": False}, 1, {"aten::mul"}, 6, id="bench"),
        pytest.param({"tp_invariant": True}, 8, {"aten::addcmul_"}, 12, id="bits-main_grad"),
        pytest.param(
            {"tp_invariant": False, "accumulate_in_forward": True}, 1, set(), 0, id="run-main_grad"
        ),
    ],
)
@pytest.mark.usefixtures("launches")
def test_passes_over_memory_of_the_head(request, options, num_logits, weight_pass, weight_bytes):
    """Qwen2.5-32B with 20,480 tokens, whose passes and bytes are in benchmarks/README.md."""
    has_main_grad = "main_grad" in request.node.callspec.id
    tokens, hidden_size, vocab = 20_480, 5120, 152_064
    hidden = fake(tokens, hidden_size, dtype=torch.bfloat16)
    weight = fake(vocab, hidden_size, dtype=torch.bfloat16)
    if has_main_grad:
        weight.main_grad = fake(vocab, hidden_size)
    indices = fake(tokens, dtype=torch.int64)
    given = PolicyInputs(
        logprobs_old=fake(tokens),
        advantages=fake(tokens),
        loss_weights=fake(tokens),
        logprobs_ref=None,
        importance_weights=None,
    )
    chosen = HeadOptions(rows=indices, check_inputs=False, **options)
    call = plan_call(hidden, weight, indices, chosen, given)
    context = SimpleNamespace(
        needs_input_grad=(True, True),
        mark_non_differentiable=lambda *_: None,
        set_materialize_grads=lambda _: None,
    )
    with bytes_moved() as moved, _Calls() as calls:
        _PolicyHeadFunction.forward(context, hidden, weight, call, given, PolicyObjective(), True)
        d_hidden, d_weight, *_ = _PolicyHeadFunction.backward(context, fake())
    num_blocks, num_tiles = 5, 9
    products = num_tiles * num_logits + 2 * num_blocks
    assert calls.names["aten::mm"] + calls.names["aten::addmm"] == products
    large = {name: size for name, size in moved.items() if size > 2e9}
    large = {name: size for name, size in large.items() if not name.endswith(("mm", "device"))}
    assert large.keys() == weight_pass | {"row_stats_kernel", "policy_rows_kernel"}
    # fp32 logits are read twice, their bf16 gradient is written
    expected = tokens * vocab * (4 + 4 + 2) + vocab * hidden_size * weight_bytes
    assert sum(large.values()) == pytest.approx(expected, rel=1e-4)
    assert d_hidden.dtype == torch.bfloat16 and (d_weight is None) == has_main_grad
