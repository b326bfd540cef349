"""megatron-core's distributed AdamW, and the guard that keeps non-finite numbers out of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from torch.profiler import record_function

from megadapo.trainer.config import OptimizerConfig


@dataclass(frozen=True)
class OptimizerStep:
    """What became of one update."""

    grad_norm: float
    """Global gradient norm before clipping; non-finite where the update was skipped for it."""
    applied: bool
    """Whether it could be: its numbers were finite."""


def build_optimizer(
    chunks: list[DistributedDataParallel], config: OptimizerConfig
) -> MegatronOptimizer:
    """AdamW with fp32 master weights and moments, sharded over data-parallel ranks."""
    dtype = next(chunks[0].parameters()).dtype
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=0.0,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.grad_clip,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
            **cpu_offload_options(config),
        ),
        chunks,
    )
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, torch.optim.AdamW):
            _allocate_moments(part.optimizer)
            take_one_pass(part.optimizer)
    return optimizer


def cpu_offload_options(config: OptimizerConfig) -> dict[str, Any]:
    """megadapo's choice in megatron-core's terms."""
    if config.cpu_offload_fraction == 0.0:
        return {}
    return {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": config.cpu_offload_fraction,
        # gradients and weights travel while other weights are updated
        "overlap_cpu_optimizer_d2h_h2d": True,
        # the hybrid optimizer then owns the masters too; else they would stay on the GPU
        "use_precision_aware_optimizer": True,
    }


def _allocate_moments(optimizer: torch.optim.AdamW) -> None:
    """Zero moments now: torch makes them in the first step, too late to load a checkpoint into."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }


def take_one_pass(optimizer: torch.optim.AdamW) -> None:
    """On the CPU go through parameters, gradients and moments once, not once an operation.

    A rank may own nothing of a group.
    """
    for group in optimizer.param_groups:
        if any(param.device.type == "cpu" for param in group["params"]):
            group["fused"] = True


@record_function("megadapo::optimizer")
def step_if_finite(optimizer: MegatronOptimizer, *, loss: float, lr: float | None) -> OptimizerStep:
    """Apply one update, or on every rank none if the loss or the gradient norm is not finite.

    Weights and moments are bit-unchanged by a skipped update and by one that is not wanted.

    Args:
        loss: of the whole mini-batch, the same number on every rank.
        lr: learning rate of this update; None: only its gradient is measured.
    """
    optimizer.prepare_grads()
    # the norm is reduced over all ranks, so all of them take the same branch
    grad_norm = float(optimizer.get_grad_norm())
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return OptimizerStep(grad_norm, applied=False)
    if lr is None:
        return OptimizerStep(grad_norm, applied=True)
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_mult"]
    applied, _, _ = optimizer.step()
    assert applied, "no loss scaling, so no reason for megatron-core to refuse a finite update"
    return OptimizerStep(grad_norm, applied=True)
