"""Which trainer rank holds what, for a given set of parallel sizes."""

from __future__ import annotations

from megadapo.errors import WeightError
from megadapo.weights.layout.layout import ModelLayout, padded_vocab_size
from megadapo.weights.layout.shards import ShardPosition
from megadapo.weights.layout.stages import stage_layers


def replica_positions(
    layout: ModelLayout,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    vpp_size: int = 1,
    ep_size: int = 1,
    etp_size: int | None = None,
    stages: list[tuple[int, ...]] | None = None,
    num_dp: int = 1,
) -> list[ShardPosition]:
    """Position of every rank, in Megatron's rank order (TP fastest, then DP with EP, then PP).

    Experts cut the TP x DP ranks of a stage anew: expert TP fastest, then EP, then replicas.

    Args:
        stages: Layers of each pipeline stage; None spreads them evenly.
        num_dp: Ranks with the same weights outside of experts, context-parallel ones included.
    """
    sizes = {"TP": tp_size, "PP": pp_size, "VPP": vpp_size, "EP": ep_size, "DP": num_dp}
    for name, size in sizes.items():
        if size < 1:
            raise WeightError(f"{name} must be at least 1, but it is {size}.")
    stages = stages or stage_layers(layout.shape.num_layers, pp_size=pp_size, vpp_size=vpp_size)
    etp = tp_size if etp_size is None else etp_size
    per_stage = tp_size * num_dp
    if per_stage % (etp * ep_size):
        raise WeightError(
            f"{per_stage} ranks of a pipeline stage (TP {tp_size} x DP {num_dp}) cannot be cut "
            f"into expert TP {etp} x EP {ep_size}."
        )
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
        for rank in range(per_stage)
    ]
