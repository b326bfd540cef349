"""Gradient buffers, their traffic over replicas, and megatron-core's distributed AdamW.

With `trainer.overlap_data_parallel`, a bucket of gradients is summed as soon as the last backward
pass has filled it, and a bucket's updated weights arrive just before the forward pass that reads
them. Between an optimizer step and that pass, only a rank's own shard is up to date. Any other
reader calls `gather_weights_now` first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as finalize_sums_and_scale
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.profiler import record_function

from megadapo.trainer.config import ADAM_EPS, OptimizerConfig, TrainerConfig
from megadapo.trainer.model.megatron_internals import allocate_moments, clip_and_step, param_groups


def wrap_for_gradients(
    chunks: list[GPTModel], config: TransformerConfig, trainer: TrainerConfig
) -> list[DistributedDataParallel]:
    """Add fp32 gradient buffers that are summed (not averaged) over data parallel.

    It also tells megatron-core's schedules through `config` when to start the sums.
    """
    assert config.calculate_per_token_loss, "otherwise gradients are averaged over data parallel"
    overlap = trainer.overlap_data_parallel and trainer.num_replicas > 1
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        align_param_gather=overlap and len(chunks) > 1,
        bucket_size=trainer.bucket_parameters or None,
    )
    wrapped = [
        DistributedDataParallel(
            config=config,
            ddp_config=settings,
            module=chunk,
            # the first chunk's compute hides the traffic of later chunks anyway
            disable_bucketing=number > 0,
        )
        for number, chunk in enumerate(chunks)
    ]
    _set_sync_functions(config, wrapped)
    return wrapped


def gather_weights_now(chunks: list[DistributedDataParallel]) -> None:
    """Complete all weights that would wait for the next forward pass; collective."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def wait_for_weight(chunk: DistributedDataParallel, weight: Tensor) -> None:
    """Wait for a weight that is read outside of its own module's forward pass.

    megatron-core waits in a hook before each module's forward pass. The policy head reads the
    output layer's weight without calling that layer.
    """
    if chunk.ddp_config.overlap_param_gather:
        chunk.param_to_bucket_group[weight].finish_param_sync(
            skip_next_bucket_dispatch=chunk.ddp_config.align_param_gather
        )


def finalize_sums(chunks: list[DistributedDataParallel], num_tokens: Any, **groups: Any) -> None:
    """Reduce gradients over all groups as megatron-core does, but without dividing by tokens."""
    finalize_sums_and_scale(chunks, None, **groups)


def _set_sync_functions(config: TransformerConfig, chunks: list[DistributedDataParallel]) -> None:
    """Tell the schedules when to reduce and gather; all pipeline stages do it at the same time."""
    settings = chunks[0].ddp_config
    if settings.overlap_grad_reduce:
        config.no_sync_func = _for_schedule([chunk.no_sync for chunk in chunks])
        config.grad_sync_func = _for_schedule([chunk.start_grad_sync for chunk in chunks])
    if settings.align_param_gather:
        config.param_sync_func = _for_schedule([chunk.start_param_sync for chunk in chunks])


def _for_schedule(functions: list[Callable[..., Any]]) -> Any:
    """Return a list for the interleaved schedule and a single function for the others."""
    return functions if len(functions) > 1 else functions[0]


def build_optimizer(
    chunks: list[DistributedDataParallel], config: OptimizerConfig
) -> MegatronOptimizer:
    """Return AdamW with fp32 master weights and moments, sharded over data-parallel ranks."""
    dtype = next(chunks[0].parameters()).dtype
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=0.0,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=ADAM_EPS,
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
        # only megatron-core's own scheduler would apply wd_mult, which is 0 for biases and norms
        for group in param_groups(part):
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
        if isinstance(part.optimizer, torch.optim.AdamW):
            use_fused_adamw(part.optimizer)
    allocate_moments(optimizer)
    return optimizer


def cpu_offload_options(config: OptimizerConfig) -> dict[str, Any]:
    """Return megatron-core's options for `cpu_offload_fraction`."""
    if config.cpu_offload_fraction == 0.0:
        return {}
    return {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": config.cpu_offload_fraction,
        # copy gradients and weights while other weights are updated
        "overlap_cpu_optimizer_d2h_h2d": True,
        # let the hybrid optimizer own the masters too; they would stay on the GPU otherwise
        "use_precision_aware_optimizer": True,
    }


def use_fused_adamw(optimizer: torch.optim.AdamW) -> None:
    """Use torch's fused AdamW: one pass over memory instead of one per operation."""
    for group in optimizer.param_groups:
        group["fused"] = True


@record_function("megadapo::optimizer")
def step_if_finite(optimizer: MegatronOptimizer, *, loss: float, lr: float | None) -> float | None:
    """Apply one update; return the global gradient norm before clipping, None if it was skipped.

    Every rank skips it if the loss or the gradient norm is not finite. A skipped update changes no
    bit of weights and moments.

    Args:
        loss: of the whole mini-batch, the same number on every rank.
        lr: learning rate of this update; None measures the gradient and changes no weights.
    """
    optimizer.prepare_grads()
    # the norm is reduced over all ranks, so all of them take the same branch
    grad_norm = float(optimizer.get_grad_norm())
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return None
    if lr is not None:
        for group in optimizer.param_groups:
            group["lr"] = lr
        clip_and_step(optimizer, grad_norm)
    return grad_norm
