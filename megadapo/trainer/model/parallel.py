"""Process groups of the trainer and this rank's place in them."""

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
from megadapo.trainer.model.model_layout import layers_of_stages
from megadapo.trainer.types import Rendezvous
from megadapo.weights.layout.shards import ShardPosition


def join_groups(
    rendezvous: Rendezvous,
    trainer: TrainerConfig,
    listener: socket.socket | None,
    *,
    seed: int,
) -> None:
    """Join the world and form the tensor-, pipeline-, context- and data-parallel groups."""
    cuda = torch.cuda.is_available()
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
    _meet_in_groups_of_messages("cuda" if cuda else "cpu")
    seed_everything(seed)


def _meet_in_groups_of_messages(device: str) -> None:
    """Let all ranks enter the first operation of each group that carries messages between pairs.

    torch asks for it: NCCL's communicator of a group is made in the group's first operation, and
    messages between some of its ranks would wait there for the others. A relay of weights between
    nodes (weights/sync/sender.py) is such a first operation of the world.
    """
    groups = (
        torch.distributed.group.WORLD,
        mpu.get_pipeline_model_parallel_group(),
        # keys and values go around in it
        mpu.get_context_parallel_group(),
    )
    for group in groups:
        torch.distributed.all_reduce(torch.zeros(1, device=device), group=group)


def context_part() -> ContextPart:
    """Which tokens of every sequence are this rank's."""
    return ContextPart(mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size())


def add_up_over_context(values: Tensor) -> None:
    """Sum in place over the ranks that share the sequences' tokens; collective among them."""
    if mpu.get_context_parallel_world_size() > 1:
        torch.distributed.all_reduce(values, group=mpu.get_context_parallel_group())


def _store(
    rendezvous: Rendezvous, listener: socket.socket | None, timeout: timedelta
) -> torch.distributed.TCPStore:
    """Where ranks exchange addresses; torch's own listener would take calls on every interface."""
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
    """Same state on every rank; only a model with dropout would draw from it."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def leave_groups() -> None:
    """Take the groups apart, so that a process can join others."""
    if torch.distributed.is_initialized():
        mpu.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def shard_position(chunks: Sequence[GPTModel], trainer: TrainerConfig) -> ShardPosition:
    """What this rank holds of every weight."""
    stage = mpu.get_pipeline_model_parallel_rank()
    layers = layers_of_stages(chunks[0].config.num_layers, trainer)[stage]
    assert layers == tuple(n for chunk in chunks for n in _layers(chunk)), "megatron-core's split"
    return ShardPosition(
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        tp_size=mpu.get_tensor_model_parallel_world_size(),
        pp_rank=stage,
        pp_size=mpu.get_pipeline_model_parallel_world_size(),
        layer_indices=layers,
        has_embedding=mpu.is_pipeline_first_stage(),
        has_head=mpu.is_pipeline_last_stage(),
        ep_rank=mpu.get_expert_model_parallel_rank(),
        ep_size=mpu.get_expert_model_parallel_world_size(),
        etp_rank=mpu.get_expert_tensor_parallel_rank(),
        etp_size=mpu.get_expert_tensor_parallel_world_size(),
        padded_vocab_size=chunks[0].vocab_size,
    )


def parameters_by_global_name(chunks: Sequence[GPTModel]) -> dict[str, Tensor]:
    """Parameters of all chunks, with layers numbered over the whole model instead of the chunk."""
    parameters: dict[str, Tensor] = {}
    for chunk in chunks:
        layers = _layers(chunk)
        own = {_global_name(name, layers): param for name, param in chunk.named_parameters()}
        assert not own.keys() & parameters.keys(), "a layer in two chunks"
        parameters |= own
    return parameters


def _layers(chunk: GPTModel) -> list[int]:
    """Numbers of its layers in the whole model, from 0; megatron-core counts from 1."""
    return [layer.layer_number - 1 for layer in chunk.decoder.layers]


def _global_name(name: str, layers: Sequence[int]) -> str:
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(layers[int(parts[2])])
    return ".".join(parts)
