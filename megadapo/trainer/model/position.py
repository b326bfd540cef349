"""This rank's place in the model: the layers it holds, and its parameters by global name."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megadapo.trainer.config import TrainerConfig
from megadapo.trainer.model.stages import layers_of_stages
from megadapo.weights.layout.shards import ShardPosition


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
