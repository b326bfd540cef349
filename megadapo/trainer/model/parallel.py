"""Process groups of the trainer, this rank's place in them, and the layers it holds."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megadapo.cluster.this_node import use_interface_towards
from megadapo.trainer.batch.packing import ContextPart
from megadapo.trainer.config import TrainerConfig
from megadapo.trainer.types import Rendezvous


def join_groups(
    rendezvous: Rendezvous,
    trainer: TrainerConfig,
    listener: socket.socket | None,
    *,
    seed: int,
) -> torch.device:
    """Join the world and form the tensor-, pipeline-, context- and data-parallel groups.

    Return the device on which this rank computes.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    timeout = timedelta(seconds=trainer.timeout_s)
    use_interface_towards(rendezvous.address)
    torch.distributed.init_process_group(
        backend="cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=_store(rendezvous, listener, timeout),
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=timeout,
    )
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=trainer.tensor_parallel,
        pipeline_model_parallel_size=trainer.pipeline_parallel,
        virtual_pipeline_model_parallel_size=(
            trainer.virtual_pipeline if trainer.virtual_pipeline > 1 else None
        ),
        context_parallel_size=trainer.context_parallel,
        expert_model_parallel_size=trainer.expert_parallel,
        expert_tensor_parallel_size=trainer.expert_tensor_parallel,
        distributed_timeout_minutes=max(1, round(trainer.timeout_s / 60)),
        # the reshardable optimizer checkpoint gathers over Gloo
        create_gloo_process_groups=True,
    )
    _enter_groups(device)
    seed_everything(seed)
    return device


def _enter_groups(device: torch.device) -> None:
    """Run a first collective in each group that later carries messages between pairs.

    torch requires it: NCCL creates a group's communicator in its first operation. A message between
    two of the ranks would wait there for the others. A relay of weights between nodes
    (weights/sync/sender.py) is such a first operation of the world.
    """
    groups = (
        torch.distributed.group.WORLD,
        mpu.get_pipeline_model_parallel_group(),
        # keys and values are passed around in it
        mpu.get_context_parallel_group(),
    )
    for group in groups:
        torch.distributed.all_reduce(torch.zeros(1, device=device), group=group)


def _store(
    rendezvous: Rendezvous, listener: socket.socket | None, timeout: timedelta
) -> torch.distributed.TCPStore:
    """Open the store on one interface; torch's own listener would accept on every interface."""
    is_host = rendezvous.rank == 0
    master_listen_fd = None
    if is_host:
        listener = listener or socket.create_server((rendezvous.address, rendezvous.port))
        master_listen_fd = listener.detach()
    return torch.distributed.TCPStore(
        rendezvous.address,
        rendezvous.port,
        rendezvous.world_size,
        is_host,
        timeout=timeout,
        master_listen_fd=master_listen_fd,
    )


def seed_everything(seed: int) -> None:
    """Seed all generators alike on every rank; only a model with dropout would draw from them."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def leave_groups() -> None:
    """Destroy the groups, so that the process can join others."""
    if torch.distributed.is_initialized():
        mpu.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def has_results() -> bool:
    """Return whether this rank's sums count: one tensor-parallel rank of each last stage.

    All of its context-parallel ranks count, as they have different tokens.
    """
    return bool(mpu.is_pipeline_last_stage() and mpu.get_tensor_model_parallel_rank() == 0)


def context_part() -> ContextPart:
    """Return this rank's part of every sequence."""
    return ContextPart(mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size())


def add_up_over_context(values: Tensor) -> None:
    """Sum in place over the ranks that share the sequences' tokens; collective among them."""
    if mpu.get_context_parallel_world_size() > 1:
        torch.distributed.all_reduce(values, group=mpu.get_context_parallel_group())


def parameters_by_global_name(chunks: Sequence[GPTModel]) -> dict[str, Tensor]:
    """Return the parameters of all chunks, with layer numbers of the whole model."""
    parameters: dict[str, Tensor] = {}
    for chunk in chunks:
        # megatron-core counts from 1
        layers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        for name, parameter in chunk.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(layers[int(parts[2])])
            global_name = ".".join(parts)
            assert global_name not in parameters, "a layer in two chunks"
            parameters[global_name] = parameter
    return parameters
