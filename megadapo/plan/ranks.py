"""Memory of trainer ranks (weights, gradients, optimizer) and of engine ranks.

GPUs also need memory for CUDA, NCCL, position tables and fragmentation. No number of it is
measured; each constant names its source. Gloo's buffers are in main memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from megadapo.config import RunConfig
from megadapo.models.description import ModelDescription
from megadapo.plan.cards import GIB, GPUS_PER_NODE, MIB, Card
from megadapo.rollout.config import RolloutConfig
from megadapo.trainer.config import TrainerConfig
from megadapo.trainer.model.model_layout import chunks_of_stages, rank_positions
from megadapo.weights.layout.layout import ModelLayout
from megadapo.weights.layout.shards import EnginePosition, Shard

CONTEXT_BYTES = 800 * MIB
"""CUDA context of a process, its loaded kernels, and workspaces of cuBLAS and cuDNN; a guess."""
GRAPH_BYTES = GIB
"""CUDA graphs of an engine rank, which it keeps while it sleeps; a guess."""
FRAGMENTATION = 0.15
"""Share of a step's temporary memory that is lost between its tensors; a guess.

Micro-batches have other lengths each time, and torch cannot join free segments without expandable
segments. Weight buckets forbid these: CUDA IPC cannot share them.
"""
CHANNEL_BYTES = 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8 + (4 << 20)
"""NCCL's receive buffers of one channel from one peer, for its three protocols.

Source: `computeBuffSizes` in NCCL's init.cc and `p2pRecvSetup` in its transport/p2p.cc.
"""
COMMUNICATOR_BYTES = 2 * 24 * CHANNEL_BYTES
"""NCCL's buffers of a group's collectives: 24 channels in a ring, and as many in trees."""
PEER_CHANNELS, PEER_CHANNELS_OVER_NODES = 32, 2
"""Channels to a peer of the same node, in a group of one node and of several nodes.

Source: `ncclTopoComputeP2pChannels` in NCCL's graph/paths.cc, with NVSwitch.
"""
NETWORK_BYTES = 2 * 32 * 16 * 128 * 1024
"""Buffers of a group's messages to other nodes, which its peers share: 32 channels of 16 chunks to
send and to receive (`sharedNetBuffersInit` in NCCL's transport/net.cc)."""
NUM_TABLES, TABLE_SEGMENT = 32, 20 * MIB
"""Position tables that megatron-core keeps: `lru_cache(maxsize=32)` at `RotaryEmbedding.forward`;
and the segment in which torch places a table of less than 10 MiB (c10/core/AllocatorConfig.h)."""
FP32_BYTES = 4
SCALED_WEIGHTS, SCALE_BYTES = 128 * 128, 4
"""Weights per scale of a quantised matrix, and bytes of a scale."""
LOGIT_BYTES = 14
"""Bytes per response and vocabulary entry: bf16 and fp32 logits, log-probs, and noise."""


def trainer_process_bytes(config: RunConfig) -> int:
    """Return the bytes of a rank's CUDA context and of the groups that it communicates in."""
    trainer = config.trainer
    tp, cp, pp = trainer.tensor_parallel, trainer.context_parallel, trainer.pipeline_parallel
    dp, ep, etp = trainer.data_parallel, trainer.expert_parallel, trainer.expert_tensor_parallel
    # the optimizer has a group of all ranks for the norm of the gradients, beside the world
    sizes = [tp, cp, pp, cp * dp, tp * cp * dp * pp, tp * cp * dp * pp]
    if ep > 1:
        # experts' ranks, those with their tensor parallelism, and the copies of each expert
        sizes += [ep, ep * etp, tp * cp * dp // (ep * etp)]
    num_groups = sum(size > 1 for size in sizes)
    if config.cluster.placement == "separate":
        num_groups += 1  # of trainer and engines, for weights
    return CONTEXT_BYTES + num_groups * COMMUNICATOR_BYTES + message_bytes(trainer)


def message_bytes(trainer: TrainerConfig) -> int:
    """Return NCCL's buffers for messages between pairs of ranks, group by group.

    NCCL makes the channels to a peer with the first message to it. They are in addition to those
    of collectives.
    """
    tp, cp, pp = trainer.tensor_parallel, trainer.context_parallel, trainer.pipeline_parallel
    ep, etp = trainer.expert_parallel, trainer.expert_tensor_parallel
    groups = [
        # weights that a rank relays to an engine of its node, from at most all ranks of the node
        (min(trainer.num_ranks, GPUS_PER_NODE) - 1, trainer.num_ranks),
        (min(pp - 1, 2), trainer.num_ranks),
        # keys and values go around a ring
        (min(cp - 1, 2), tp * cp),
        # each rank of experts sends tokens to all others
        (min(ep, GPUS_PER_NODE) - 1, ep * etp),
    ]
    total = 0
    for num_peers, extent in groups:
        if num_peers and extent <= GPUS_PER_NODE:
            total += num_peers * PEER_CHANNELS * CHANNEL_BYTES
        elif num_peers:
            total += num_peers * PEER_CHANNELS_OVER_NODES * CHANNEL_BYTES + NETWORK_BYTES
    return total


def table_bytes(config: RunConfig, *, head_dim: int) -> int:
    """Return the bytes of the position tables that megatron-core keeps on a rank.

    A micro-batch needs a table of fp32 angles as long as its longest sequence, and nearly every
    micro-batch has another length. Old tables keep their memory from step to step.
    """
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    table = -(-longest * head_dim * 4 // (2 * MIB)) * 2 * MIB
    return min(NUM_TABLES, longest) * (table if table > TABLE_SEGMENT // 2 else TABLE_SEGMENT)


def engine_process_bytes(rollout: RolloutConfig) -> int:
    """Return the bytes of an engine rank outside `rollout.gpu_memory_utilization`.

    vLLM joins its groups before it takes the budget from the free memory (`init_device` in
    v1/worker/gpu_worker.py).
    """
    groups = (rollout.tensor_parallel > 1, rollout.pipeline_parallel > 1, rollout.expert_parallel)
    return CONTEXT_BYTES + sum(groups) * COMMUNICATOR_BYTES


def sleeping_bytes(config: RunConfig) -> int:
    """Return the GPU memory of a sleeping engine rank."""
    vllm = config.rollout.vllm
    keeps_graphs = not (vllm.get("enforce_eager") or vllm.get("sleep_mode_offload_cudagraph"))
    process = engine_process_bytes(config.rollout)
    if vllm.get("enable_nccl_comm_suspend"):
        process = CONTEXT_BYTES
    return process + keeps_graphs * GRAPH_BYTES


@dataclass(frozen=True, kw_only=True)
class RankKind:
    """Trainer ranks with equal memory: those of one pipeline stage."""

    stage: int
    num_stages: int
    chunk_layers: tuple[int, ...]
    """Number of layers of each chunk."""
    num_parameters: int
    num_expert_parameters: int
    """Number of parameters in experts (included above), which fewer ranks replicate."""
    has_head: bool

    @property
    def name(self) -> str:
        if self.num_stages == 1:
            return "trainer rank"
        return f"trainer rank of stage {self.stage + 1} of {self.num_stages}"


@dataclass(frozen=True)
class StateBytes:
    """Memory that a trainer rank keeps from step to step."""

    weights: int
    gradients: int
    """Gradients in fp32, for weights of any type."""
    optimizer: int
    """This rank's share of Adam's two moments and, for bf16 weights, of their fp32 masters."""
    main_memory: int = 0
    """Main memory of the optimizer on the CPU, with the gradients and weights it works on."""
    snapshot: int = 0
    """This rank's part of a checkpoint, of which a save makes a copy in main memory."""


@dataclass(frozen=True, kw_only=True)
class EngineBytes:
    """Memory of an engine's largest rank while it generates: vLLM's budget."""

    weights: int
    workspace: int
    """Activations of the largest step, logits of all responses, and CUDA graphs."""
    cache: int
    """Rest of the budget; negative if it is exceeded."""
    token: int
    """Cache of one token."""
    repacked: int
    """Memory that a weight update needs beside the weights. vLLM repacks experts and quantised
    weights layer by layer, so it holds one layer as it arrives and as it computes with it."""

    @property
    def cache_tokens(self) -> int:
        """Tokens in the cache, prompts included."""
        return max(0, self.cache // self.token)


def rank_kinds(layout: ModelLayout, trainer: TrainerConfig) -> list[RankKind]:
    """Return one kind per pipeline stage: its ranks have equal shares of the matrices."""
    chunks = chunks_of_stages(layout.shape.num_layers, trainer)
    firsts = rank_positions(layout, trainer)[:: trainer.tensor_parallel * trainer.num_replicas]
    kinds = []
    for position in firsts:
        num_layers = len(position.layer_indices)
        # all layers have the same number of parameters
        layer = list(layout.megatron_layer(position, "0"))
        ends = layout.megatron_shards(replace(position, layer_indices=()))
        experts = (shard for shard in layer if ".experts." in shard.name)
        kind = RankKind(
            stage=position.pp_rank,
            num_stages=position.pp_size,
            chunk_layers=tuple(len(chunk) for chunk in chunks[position.pp_rank]),
            num_parameters=_num_elements(ends) + num_layers * _num_elements(layer),
            num_expert_parameters=num_layers * _num_elements(experts),
            has_head=position.has_head,
        )
        kinds.append(kind)
    return kinds


def state_bytes(
    kind: RankKind, trainer: TrainerConfig, *, itemsize: int, cpu_fraction: float = 0.0
) -> StateBytes:
    """Return the size of megatron-core's buffers and its distributed optimizer.

    Args:
        itemsize: bytes of one element of the weights.
        cpu_fraction: share of the optimizer in main memory.
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
        snapshot=num_updated * (itemsize + per_parameter),
    )


def itemsize_of(config: RunConfig) -> int:
    """Return the bytes of an element of weights and activations."""
    return 4 if config.model.dtype == "float32" else 2


def engine_bytes(config: RunConfig, model: ModelDescription, card: Card) -> EngineBytes:
    """Return an engine rank's share of a card."""
    rollout, itemsize = config.rollout, itemsize_of(config)
    shape, tp = model.shape, rollout.tensor_parallel
    layout = ModelLayout(model.family, model.shape)
    positions = tuple(
        EnginePosition(
            tp_size=tp,
            pp_rank=stage,
            pp_size=rollout.pipeline_parallel,
            expert_parallel=rollout.expert_parallel,
        )
        for stage in range(rollout.pipeline_parallel)
    )
    num_parameters, num_linear = _engine_parameters(layout, positions)
    weights = num_parameters * itemsize
    if rollout.quantization == "fp8":
        weights -= num_linear * (itemsize - 1) - num_linear * SCALE_BYTES // SCALED_WEIGHTS
    activation = 3 * mlp_width(model) // tp + 4 * shape.hidden_size
    workspace = rollout.vllm_arguments["max_num_batched_tokens"] * activation * itemsize
    workspace += rollout.max_num_seqs * shape.vocab_size * LOGIT_BYTES
    workspace += 0 if rollout.vllm.get("enforce_eager") else GRAPH_BYTES
    num_layers = max(len(layout.engine_layers(position)) for position in positions)
    kv_heads = max(1, shape.num_kv_heads // tp)
    repacks = model.routing is not None or rollout.quantization == "fp8"
    return EngineBytes(
        weights=weights,
        workspace=workspace,
        cache=int(rollout.gpu_memory_utilization * card.memory_bytes) - weights - workspace,
        token=2 * num_layers * kv_heads * shape.head_dim * itemsize,
        repacked=2 * weights // num_layers if repacks else 0,
    )


def mlp_width(model: ModelDescription) -> int:
    """Return the columns between the matrices of a layer's MLP, or of one token's experts."""
    if model.routing is None:
        return model.shape.ffn_size
    return model.routing.experts_per_token * model.shape.expert_ffn_size


@lru_cache(maxsize=16)
def _engine_parameters(
    layout: ModelLayout, positions: tuple[EnginePosition, ...]
) -> tuple[int, int]:
    """Return all and only the linear layers' parameters of the largest engine rank."""
    sizes = []
    for position in positions:
        shards = list(layout.engine_shards(position))
        in_layers = (shard for shard in shards if shard.name.startswith("model.layers."))
        linear = (shard for shard in in_layers if shard.width is not None)
        sizes.append((_num_elements(shards), _num_elements(linear)))
    return max(sizes)


def _num_elements(shards: Iterable[Shard]) -> int:
    """Count elements of parameters, padding included; each expert of a stack counts by itself."""
    return sum(shard.length * shard.numel_per_row for shard in shards)
