"""The head's products: bf16 with fp32 results on a CPU, and the weight's gradient as in Megatron.

Megatron's convention is an fp32 main_grad, a dummy gradient and a hook.
"""

import pytest
import torch
from torch import Tensor

from megadapo.kernels.cpu import native
from megadapo.kernels.policy_head import policy_head_loss, token_logprobs
from megadapo.kernels.policy_head.products import (
    has_fp32_product,
    load_product,
    mm_fp32,
    mm_fp32_scratch,
)
from megadapo.kernels.torch_internals import find_brgemm
from tests.support.trainer.head_cases import make_case, relative_error

ROUTES = ["widened"]


def megatron_parameter(weight: Tensor) -> torch.nn.Parameter:
    """Return a parameter as Megatron's DistributedDataParallel prepares it."""
    parameter = torch.nn.Parameter(weight.clone())
    parameter.main_grad = torch.zeros(weight.shape)
    parameter.grad_added_to_main_grad = False
    return parameter


@pytest.mark.parametrize("in_forward", [False, True], ids=["in_backward", "in_forward"])
@pytest.mark.parametrize(
    "dtype, tolerance",
    [
        pytest.param(torch.float32, 2e-6, id="fp32"),
        pytest.param(torch.bfloat16, 4e-3, id="bf16_grads"),
    ],
)
def test_main_grad_accumulates_over_micro_batches(dtype, tolerance, in_forward):
    """Two micro-batches of different loss scale, one of them interleaved as in 1F1B."""
    scales = (1.0, 1.0) if in_forward else (4.0, 0.5)
    first, second = make_case(60, 24, 304, dtype=dtype), make_case(41, 24, 304, dtype=dtype, seed=1)
    second.weight = first.weight
    weight = megatron_parameter(first.weight)
    hidden = [case.hidden.clone().requires_grad_() for case in (first, second)]
    losses = [
        policy_head_loss(
            h,
            weight,
            case.targets,
            chunk_tokens=24,
            accumulate_in_forward=in_forward,
            **case.kwargs,
        ).loss
        for h, case in zip(hidden, (first, second), strict=True)
    ]
    (losses[1] * scales[1]).backward()
    (losses[0] * scales[0]).backward()
    expected = first.definition(scales[0]).d_weight + second.definition(scales[1]).d_weight
    assert weight.main_grad.dtype == torch.float32
    assert relative_error(weight.main_grad, expected) <= tolerance
    assert weight.grad_added_to_main_grad
    assert relative_error(hidden[0].grad, first.definition(scales[0]).d_hidden) <= tolerance


def test_main_grad_is_unchanged_before_backward():
    """An evaluation forward, or zero_grad between forward and backward, must not corrupt it."""
    case = make_case(30, 24, 304)
    weight = megatron_parameter(case.weight)
    loss = policy_head_loss(case.hidden, weight, case.targets, **case.kwargs).loss
    assert not weight.main_grad.any()
    loss.backward()
    assert weight.main_grad.any()


def test_accumulation_in_forward_holds_all_before_the_hook_and_needs_gradient_1():
    """A reduction may start in the hook. The scale of a loss would change d_hidden alone."""
    case = make_case(30, 24, 304)
    options = case.kwargs | {"accumulate_in_forward": True}
    weight = megatron_parameter(case.weight)
    with torch.no_grad():
        policy_head_loss(case.hidden, weight, case.targets, **options)
    assert not weight.main_grad.any()
    loss = policy_head_loss(case.hidden, weight, case.targets, **options).loss
    before = weight.main_grad.clone()
    assert relative_error(before, case.definition().d_weight) <= 2e-6
    seen = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.main_grad.clone()))
    loss.backward(retain_graph=True)
    assert torch.equal(seen[0], before) and weight.grad_added_to_main_grad
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    loss = policy_head_loss(case.hidden, weight, case.targets, **options).loss
    with pytest.raises(RuntimeError, match="gradient 1"):
        (loss * 2.0).backward()


def test_hook_fires_with_a_gradient():
    """Megatron's overlapped reduction starts in this hook and asserts that grad is there."""
    case = make_case(30, 24, 304)
    for loss_weights in (case.loss_weights, torch.zeros(30)):
        weight = megatron_parameter(case.weight)
        seen = []
        weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad))
        case.kwargs["loss_weights"] = loss_weights
        policy_head_loss(case.hidden, weight, case.targets, **case.kwargs).loss.backward()
        assert len(seen) == 1 and seen[0] is not None and seen[0].shape == weight.shape


@pytest.mark.parametrize("in_forward", [False, True])
def test_tied_embedding_keeps_its_own_gradient(in_forward):
    """With zero_out_wgrad Megatron adds param.grad to main_grad: it must hold the rest only."""
    case = make_case(30, 24, 304)
    weight = megatron_parameter(case.weight)
    weight.zero_out_wgrad = True
    embedded = torch.nn.functional.embedding(torch.tensor([3, 7]), weight).sum()
    hidden = case.hidden.clone().requires_grad_()
    options = case.kwargs | {"accumulate_in_forward": in_forward}
    loss = policy_head_loss(hidden, weight, case.targets, **options).loss
    (loss + embedded).backward()
    assert weight.grad[[3, 7]].eq(1).all() and weight.grad.sum() == 2 * 24
    assert relative_error(weight.main_grad, case.definition().d_weight) <= 2e-6


def test_second_backward_is_rejected():
    """The gradient was handed over; a silent second one would be zeros or doubled."""
    case = make_case(20, 16, 200)
    loss = policy_head_loss(case.hidden.requires_grad_(), case.weight, case.targets, **case.kwargs)
    loss.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.loss.backward()


def test_recomputing_path_into_main_grad():
    case = make_case(70, 24, 304)
    plain = case.weight.clone().requires_grad_()
    weight = megatron_parameter(case.weight)
    weight.main_grad.fill_(2.0)
    for parameter in (plain, weight):
        values, entropy, _ = token_logprobs(case.hidden, parameter, case.targets, chunk_tokens=64)
        (values.sum() + 0.3 * entropy.sum()).backward()
    assert relative_error(weight.main_grad - 2.0, plain.grad.double()) <= 2e-6
    assert weight.grad_added_to_main_grad


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
