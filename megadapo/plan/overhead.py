"""GPU memory besides state, activations and caches: CUDA, NCCL, position tables, fragmentation.

No number here is measured; each constant names its source. Gloo's buffers are in main memory.
"""

from __future__ import annotations

from megadapo.config import RunConfig
from megadapo.plan.cards import GIB, GPUS_PER_NODE, MIB
from megadapo.rollout.config import RolloutConfig
from megadapo.trainer.config import TrainerConfig

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


def trainer_process_bytes(config: RunConfig) -> int:
    """Return the bytes of a rank's CUDA context and of the groups that it communicates in."""
    trainer = config.trainer
    tp, cp, dp, pp = (
        trainer.tensor_parallel,
        trainer.context_parallel,
        trainer.data_parallel,
        trainer.pipeline_parallel,
    )
    ep, etp = trainer.expert_parallel, trainer.expert_tensor_parallel
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
