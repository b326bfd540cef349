"""Layers of each pipeline stage and position of each trainer rank, for given parallel sizes.

Chunk c of all stages comes before chunk c + 1 of any: with two stages of two chunks, stage 0 has
the first and the third quarter of the layers.
"""

from __future__ import annotations

from megadapo.errors import WeightError
from megadapo.weights.layout.layout import ModelLayout, padded_vocab_size
from megadapo.weights.layout.shards import ShardPosition


def stage_chunks(
    num_layers: int, *, pp_size: int, vpp_size: int = 1, first: int = 0, last: int = 0
) -> list[list[range]]:
    """Return [stage][chunk] -> layers of the whole model; raise WeightError if a chunk has none.

    The remainder of an even split goes to the first chunks in model order.

    Args:
        vpp_size: chunks of each stage.
        first: layers of the first stage; 0: as many as the others. `last` alike.
    """
    chunks: list[list[range]] = [[] for _ in range(pp_size)]
    start = 0
    for number, size in enumerate(_chunk_sizes(num_layers, pp_size, vpp_size, first, last)):
        if size < 1:
            raise WeightError(
                f"{num_layers} layers cannot be spread over {pp_size} stages of {vpp_size} chunks."
            )
        chunks[number % pp_size].append(range(start, start + size))
        start += size
    return chunks


def joined_chunks(chunks: list[list[range]]) -> list[tuple[int, ...]]:
    """Return [stage] -> its layers, ascending, of [stage][chunk] -> layers."""
    return [tuple(layer for chunk in stage for layer in chunk) for stage in chunks]


def _chunk_sizes(num_layers: int, pp_size: int, vpp_size: int, first: int, last: int) -> list[int]:
    """Return the number of layers of each chunk, in model order."""
    fixed = {0: first} if first else {}
    fixed |= {pp_size - 1: last} if last else {}
    per_chunk = {stage: size // vpp_size for stage, size in fixed.items()}
    num_even = vpp_size * (pp_size - len(fixed))
    rest = num_layers - sum(per_chunk.values()) * vpp_size
    base, left = divmod(rest, num_even) if num_even else (0, 0)
    sizes = []
    for chunk in range(pp_size * vpp_size):
        stage = chunk % pp_size
        if stage in per_chunk:
            sizes.append(per_chunk[stage])
        else:
            sizes.append(base + (left > 0))
            left -= 1
    return sizes


def replica_positions(
    layout: ModelLayout,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    ep_size: int = 1,
    etp_size: int | None = None,
    stages: list[tuple[int, ...]] | None = None,
    num_dp: int = 1,
) -> list[ShardPosition]:
    """Return the position of every rank, in Megatron's rank order (TP fastest, then DP, then PP).

    Experts split the TP x DP ranks of a stage differently: expert TP fastest, EP, then replicas.

    Args:
        stages: layers of each pipeline stage; None spreads them evenly.
        num_dp: ranks with the same non-expert weights, context-parallel ones included.
    """
    stages = stages or joined_chunks(stage_chunks(layout.shape.num_layers, pp_size=pp_size))
    etp = tp_size if etp_size is None else etp_size
    return [
        ShardPosition(
            tp_rank=rank % tp_size,
            tp_size=tp_size,
            pp_rank=stage,
            pp_size=pp_size,
            layer_indices=stages[stage],
            has_embedding=stage == 0,
            has_head=stage == pp_size - 1,
            ep_rank=rank // etp % ep_size,
            ep_size=ep_size,
            etp_rank=rank % etp,
            etp_size=etp,
            padded_vocab_size=padded_vocab_size(layout.shape.vocab_size, tp_size),
        )
        for stage in range(pp_size)
        for rank in range(tp_size * num_dp)
    ]
