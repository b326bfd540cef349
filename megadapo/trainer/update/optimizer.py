"""megatron-core's distributed AdamW, and the guard that keeps non-finite numbers out of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.profiler import record_function

from megadapo.trainer.config import OptimizerConfig, TrainerConfig


def wrap_for_gradients(
    chunks: list[GPTModel], config: TransformerConfig, trainer: TrainerConfig
) -> list[DistributedDataParallel]:
    """Chunks with fp32 gradient buffers that are summed (not averaged) over data parallel.

    Tells megatron-core's schedules through `config` when to start that.
    """
    assert config.calculate_per_token_loss, "anything else would average over data parallel"
    has_replicas = trainer.num_replicas > 1
    overlap_param_gather = trainer.overlap_param_gather and has_replicas
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=trainer.overlap_grad_reduce and has_replicas,
        overlap_param_gather=overlap_param_gather,
        align_param_gather=overlap_param_gather and len(chunks) > 1,
        bucket_size=trainer.bucket_parameters or None,
    )
    wrapped = [
        DistributedDataParallel(
            config=config,
            ddp_config=settings,
            module=chunk,
            # the traffic of later chunks is hidden behind the first one's compute anyway
            disable_bucketing=number > 0,
        )
        for number, chunk in enumerate(chunks)
    ]
    _set_sync_functions(config, wrapped)
    return wrapped


def gather_weights_now(chunks: list[DistributedDataParallel]) -> None:
    """Make all weights whole that would else wait for the next forward pass; collective."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def wait_for_weight(chunk: DistributedDataParallel, weight: Tensor) -> None:
    """Wait until a weight is whole that is read outside of its own module's forward pass.

    megatron-core waits in a hook before each module's forward pass. The policy head reads the
    output layer's weight without calling that layer.
    """
    if chunk.ddp_config.overlap_param_gather:
        chunk.param_to_bucket_group[weight].finish_param_sync(
            skip_next_bucket_dispatch=chunk.ddp_config.align_param_gather
        )


def _set_sync_functions(config: TransformerConfig, chunks: list[DistributedDataParallel]) -> None:
    """When the schedules may reduce and gather; stages of a pipeline all at the same time."""
    settings = chunks[0].ddp_config
    if settings.overlap_grad_reduce:
        config.no_sync_func = _for_schedule([chunk.no_sync for chunk in chunks])
        config.grad_sync_func = _for_schedule([chunk.start_grad_sync for chunk in chunks])
    if settings.align_param_gather:
        config.param_sync_func = _for_schedule([chunk.start_param_sync for chunk in chunks])


def _for_schedule(functions: list[Callable[..., Any]]) -> Any:
    """The interleaved schedule takes a function per chunk, the others one function."""
    return functions if len(functions) > 1 else functions[0]


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
