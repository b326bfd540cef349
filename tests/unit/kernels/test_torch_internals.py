"""A torch without its private parts that the head uses: the head gives the same numbers."""

import ctypes
import logging
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megadapo.cluster.processes import ONEDNN_WITHOUT_BF16
from megadapo.kernels import torch_internals
from megadapo.kernels.policy_head import products
from megadapo.kernels.policy_head.rows_cpu import ROW_GRADS, ROW_STATS
from tests.support.processes.running import run_python
from tests.support.trainer.head_cases import make_case

LOST = {
    "symbols": (torch_internals, "BRGEMM_SYMBOLS", ("_ZN2at4goneEv", "_ZN2at4goneEb")),
    "library": (torch, "__file__", "/nowhere/torch/__init__.py"),
    "question for oneDNN": (torch.ops, "mkldnn", types.SimpleNamespace()),
    "question for the processor": (torch, "cpu", types.SimpleNamespace()),
    "oneDNN": (torch.backends.mkldnn, "is_available", lambda: False),
}


@pytest.fixture
def fresh_product() -> Iterator[None]:
    products.load_product.cache_clear()
    yield
    products.load_product.cache_clear()


@pytest.mark.parametrize("lost", LOST)
def test_head_without_torchs_inner_product(lost, monkeypatch, fresh_product):
    case = make_case(70, 64, 1000, padded=1024, dtype=torch.bfloat16)
    usual = case.run(chunk_tokens=64)
    products.load_product.cache_clear()
    monkeypatch.setattr(*LOST[lost])
    assert torch_internals.find_brgemm() is None
    assert not products.has_fp32_product(case.hidden, case.weight)
    got, expected = case.run(chunk_tokens=64), case.definition()
    assert (got.output.logprobs - expected.logprobs).abs().max() <= 1e-5
    assert (got.output.logprobs - usual.output.logprobs).abs().max() <= 1e-5
    got.assert_gradients(expected, 4e-3)


def test_wrong_product_is_not_used(monkeypatch, caplog, fresh_product):
    """A function of the same name with other behaviour would give wrong logits."""
    address = torch_internals.Brgemm(ctypes.c_void_p(0), ctypes.c_void_p(0))
    library = types.SimpleNamespace(megadapo_product=lambda *_: 0)
    monkeypatch.setattr(products, "find_brgemm", lambda: address)
    monkeypatch.setattr(products, "load_native", lambda _: library)
    with caplog.at_level(logging.WARNING):
        assert products.load_product() is None
    assert "gives wrong results" in caplog.text


@pytest.mark.parametrize("has_flag", [True, False])
def test_row_passes_are_in_a_profile(has_flag, monkeypatch):
    if not has_flag:
        monkeypatch.delattr(torch.autograd.profiler, "_is_profiler_enabled")
    case = make_case(5, 8, 100)
    expected = case.run()
    with torch.profiler.profile() as profile:
        got = case.run()
    names = {event.key for event in profile.key_averages()}
    assert {ROW_STATS, ROW_GRADS} <= names
    assert torch.equal(got.d_weight, expected.d_weight)


def test_every_vector_function_is_settled_on_one_thread():
    """A function or dtype that is left out could be wrong in the first update."""
    called = set()

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if args and isinstance(args[0], torch.Tensor):
                assert args[0].numel() == 1, "two threads would share the call"
                called.add((function.overloadpacket.__name__, args[0].dtype))
            return function(*args, **(kwargs or {}))

    with Recorder():
        torch_internals.settle_vector_functions()
    assert {
        (name, dtype)
        for name in ("cos", "sin", "exp", "log", "sqrt")
        for dtype in (torch.float32, torch.float64)
    } <= called


@pytest.mark.parametrize("variables", [ONEDNN_WITHOUT_BF16, {}])
def test_products_of_onednn_are_exact(variables):
    """A kernel that rounds to bf16, for which torch's setting asks, would be off by 1e-2.

    Without the environment, such a kernel exists on processors with bf16 instructions.
    """
    program = """
import torch
from megadapo.kernels.torch_internals import use_onednn_products
used = use_onednn_products()
assert torch.backends.mkldnn.matmul.fp32_precision == ("bf16" if used else "none")
a, b, out = torch.randn(300, 576), torch.randn(576, 960), torch.empty(300, 2000)
for left, right in ((a, b), (b.t(), a.t()), (a, b.t().contiguous().t())):
    view = out[: len(left), 7 : 7 + right.shape[1]].copy_(torch.zeros(()))
    expected = left.double() @ right.double()
    assert (torch.mm(left, right) - expected).abs().max() < 1e-3
    assert (torch.mm(left, right, out=view) - expected).abs().max() < 1e-3
    assert (torch.addmm(view, left, right, out=view) - 2 * expected).abs().max() < 2e-3
print(used)
"""
    used = run_python(program, **variables).stdout.strip()
    assert used in ("True", "False")
    if variables and "avx512_vnni" in Path("/proc/cpuinfo").read_text():
        assert used == "True", "torch passes no fp32 product to oneDNN any more"
