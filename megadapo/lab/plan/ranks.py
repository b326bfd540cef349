"""The kinds of trainer ranks, and what each holds all the time: weights, gradients, optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from megadapo.trainer.config import TrainerConfig
from megadapo.weights.layout.layout import ModelLayout
from megadapo.weights.layout.placement import replica_positions, stage_chunks
from megadapo.weights.layout.shards import EnginePosition, Shard, ShardPosition

FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class RankKind:
    """Trainer ranks that hold equally much: those of one pipeline stage."""

    stage: int
    num_stages: int
    chunk_layers: tuple[int, ...]
    """Layers of each chunk."""
    num_parameters: int
    num_expert_parameters: int
    """Of them, those of experts, which fewer ranks hold alike."""
    has_embedding: bool
    has_head: bool

    @property
    def num_layers(self) -> int:
        return sum(self.chunk_layers)

    @property
    def name(self) -> str:
        if self.num_stages == 1:
            return "trainer rank"
        return f"trainer rank of stage {self.stage + 1} of {self.num_stages}"


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """What a rank holds from step to step."""

    weights: int
    gradients: int
    """fp32, whatever the weights are."""
    optimizer: int
    """This rank's share of Adam's two moments and, of bf16 weights, of their fp32 masters."""
    main_memory: int = 0
    """What of them is in main memory, with the gradients and weights that the CPU works on."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def rank_kinds(layout: ModelLayout, trainer: TrainerConfig) -> list[RankKind]:
    """One kind for each pipeline stage: ranks that share matrices hold equal parts of them."""
    chunks = stage_chunks(
        layout.shape.num_layers,
        pp_size=trainer.pipeline_parallel,
        vpp_size=trainer.virtual_pipeline,
        first=trainer.first_stage_layers,
        last=trainer.last_stage_layers,
    )
    positions = replica_positions(
        layout,
        tp_size=trainer.tensor_parallel,
        pp_size=trainer.pipeline_parallel,
        ep_size=trainer.expert_parallel,
        etp_size=trainer.expert_tensor_parallel,
        num_dp=trainer.num_replicas,
        stages=[tuple(layer for chunk in stage for layer in chunk) for stage in chunks],
    )
    firsts = positions[:: trainer.tensor_parallel * trainer.num_replicas]
    return [
        RankKind(
            stage=position.pp_rank,
            num_stages=position.pp_size,
            chunk_layers=tuple(len(chunk) for chunk in chunks[position.pp_rank]),
            num_parameters=_num_parameters(layout, position),
            num_expert_parameters=len(position.layer_indices)
            * num_elements(_of_experts(layout.megatron_layer(position, "0"))),
            has_embedding=position.has_embedding,
            has_head=position.has_head,
        )
        for position in firsts
    ]


def state_bytes(
    kind: RankKind, trainer: TrainerConfig, *, itemsize: int, cpu_fraction: float = 0.0
) -> StateBytes:
    """megatron-core's buffers and its distributed optimizer.

    Args:
        itemsize: bytes of one element of the weights.
        cpu_fraction: share of the optimizer that is in main memory.
    """
    per_stage = trainer.tensor_parallel * trainer.num_replicas
    expert_replicas = per_stage // (trainer.expert_parallel * trainer.expert_tensor_parallel)
    num_dense = kind.num_parameters - kind.num_expert_parameters
    num_updated = math.ceil(num_dense / trainer.num_replicas)
    num_updated += math.ceil(kind.num_expert_parameters / expert_replicas)
    # fp32 weights are their own masters
    per_parameter = 2 * FP32_BYTES + (FP32_BYTES if itemsize < FP32_BYTES else 0)
    on_cpu = cpu_fraction * num_updated
    return StateBytes(
        weights=kind.num_parameters * itemsize,
        gradients=kind.num_parameters * FP32_BYTES,
        optimizer=int((num_updated - on_cpu) * per_parameter),
        main_memory=int(on_cpu * (per_parameter + FP32_BYTES)),
    )


def _num_parameters(layout: ModelLayout, position: ShardPosition) -> int:
    """Of one rank; all layers are alike."""
    ends = num_elements(layout.megatron_shards(replace(position, layer_indices=())))
    layer = num_elements(layout.megatron_layer(position, "0"))
    return ends + len(position.layer_indices) * layer


@lru_cache(maxsize=16)
def engine_parameters(
    layout: ModelLayout, positions: tuple[EnginePosition, ...]
) -> tuple[int, int]:
    """Parameters of the engine rank that holds most, and those that are in linear layers."""
    ranks = (list(layout.engine_shards(position)) for position in positions)
    return max((num_elements(shards), num_elements(_of_linear(shards))) for shards in ranks)


def _of_linear(shards: Iterable[Shard]) -> Iterator[Shard]:
    matrices = (shard for shard in shards if shard.width is not None)
    return (shard for shard in matrices if shard.name.startswith("model.layers."))


def _of_experts(shards: Iterable[Shard]) -> Iterator[Shard]:
    return (shard for shard in shards if ".experts." in shard.name)


def num_elements(shards: Iterable[Shard]) -> int:
    """Elements of parameters, their padding included; a stacked expert's part counts for itself."""
    return sum(shard.length * shard.numel_per_row for shard in shards)
