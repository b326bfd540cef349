"""Gradient buffers of the rank's chunks, and their traffic over replicas beside the compute.

With `overlap_grad_reduce` a bucket of gradients is summed as soon as the last backward pass has
filled it; with `overlap_param_gather` the updated weights of a bucket arrive just before the
forward pass that reads them. Between an optimizer step and that forward pass a rank's weights are
new in its own shard and old elsewhere: `gather_weights_now` is for whoever else reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megadapo.trainer.config import TrainerConfig


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
