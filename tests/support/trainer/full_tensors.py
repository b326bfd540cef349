"""Full tensors of a model that is split over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from megadapo.weights.layout.layout import ModelLayout
    from megadapo.weights.layout.shards import ShardPosition


def full_tensors(
    tensors: Mapping[str, Tensor], layout: ModelLayout, position: ShardPosition
) -> dict[str, Tensor]:
    """Gather the shards of all ranks into full tensors by Hugging Face name; collective."""
    import torch

    from megadapo.weights.disk.sources import collect_runs, match_params

    own = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    ranks = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, (position, own))
    dtype = next(iter(own.values())).dtype
    full = {name: torch.empty(shape, dtype=dtype) for name, shape in layout.hf_shapes.items()}
    # the first stage last: its embedding is the one of a tied model
    for at, local in reversed(ranks):
        for shard, tensor in match_params(local, layout, at):
            collect_runs(full, shard, tensor)
    return full
