"""Megatron's hybrid optimizer, as far as it goes without a GPU: stand-ins for what is on one.

It leaves tensors alone that are not on a GPU, so it cannot run on a CPU as it is.
"""

from contextlib import nullcontext
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megadapo.trainer.config import OptimizerConfig
from megadapo.trainer.model.megatron_internals import allocate_moments, num_updates, set_num_updates
from megadapo.trainer.update.optimizer import cpu_offload_options, use_fused_adamw
from tests.support.trainer.te_stand_in import FusedAdam

ADAM = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}


class OnHost(Tensor):
    """A tensor in main memory, beside others that count as on a GPU."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is on a GPU until it is moved to main memory, where it is another one."""
    stream = SimpleNamespace(
        wait_stream=lambda other: None,
        record_event=lambda: SimpleNamespace(wait=lambda one: None, synchronize=lambda: None),
    )
    for name, answer in (
        ("Stream", lambda: stream),
        ("current_stream", lambda: stream),
        ("stream", lambda one: nullcontext()),
    ):
        monkeypatch.setattr(torch.cuda, name, answer)
    on_gpu = property(lambda tensor: not isinstance(tensor, OnHost))
    monkeypatch.setattr(Tensor, "is_cuda", on_gpu)
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: tensor.clone().as_subclass(OnHost))
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)


def test_no_offload_options_by_default():
    assert cpu_offload_options(OptimizerConfig()) == {}


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_hybrid_optimizer_updates_like_adam(gpu, fraction):
    from megatron.core.optimizer import HybridDeviceOptimizer
    from megatron.core.optimizer import OptimizerConfig as MegatronConfig

    options = cpu_offload_options(OptimizerConfig(cpu_offload_fraction=fraction))
    assert options.keys() <= {field.name for field in fields(MegatronConfig)}
    torch.manual_seed(0)
    weights = [torch.randn(size).bfloat16() for size in (40, 7, 33, 20)]
    masters = [weight.float() for weight in weights]
    adam = torch.optim.AdamW(masters, fused=True, **ADAM)
    hybrid = HybridDeviceOptimizer(
        [{"params": weights}],
        offload_fraction=options["optimizer_offload_fraction"],
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=FusedAdam,
        param_update_in_fp32=True,
        pin_cpu_grads=False,
        overlap_cpu_optimizer_d2h_h2d=options["overlap_cpu_optimizer_d2h_h2d"],
        fused=True,
        **ADAM,
    )
    part = SimpleNamespace(is_stub_optimizer=False, optimizer=hybrid)
    whole = SimpleNamespace(chained_optimizers=[part])
    allocate_moments(whole)
    for count in range(3):
        assert num_updates(whole) == count
        for weight, master in zip(weights, masters, strict=True):
            weight.decoupled_grad = torch.randn(weight.shape)
            master.grad = weight.decoupled_grad.clone()
        hybrid.step()
        adam.step()
    for weight, master in zip(weights, masters, strict=True):
        assert torch.equal(weight, master.bfloat16())
        state = hybrid.state[weight]
        assert torch.equal(state["master_param"], master)
    moved = [weight for weight in weights if isinstance(hybrid.state[weight]["exp_avg"], OnHost)]
    assert sum(map(len, moved)) >= fraction * sum(map(len, weights))
    assert len(moved) < len(weights) or fraction == 1.0
    set_num_updates(whole, 7)
    hybrid.step()
    counts = [
        state["step"]
        for sub in hybrid.sub_optimizers
        for state in sub.state.values()
        if "step" in state
    ]
    counts += [
        group["step"]
        for sub in hybrid.sub_optimizers
        for group in sub.param_groups
        if "step" in group
    ]
    assert set(map(int, counts)) == {8}


def test_rank_without_parameters_of_a_group_can_step():
    """A rank's part of the buffer may be inside one matrix and contain no norm's weight."""
    torch.manual_seed(0)
    start, gradient = torch.randn(70), torch.randn(70)
    results = []
    for one_pass in (False, True):
        weight = torch.nn.Parameter(start.clone())
        groups = [{"params": [], "weight_decay": 0.0}, {"params": [weight]}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
        if one_pass:
            use_fused_adamw(optimizer)
            assert [group["fused"] for group in optimizer.param_groups] == [True, True]
        for _ in range(3):
            weight.grad = gradient
            optimizer.step()
        results.append(weight.detach())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)
