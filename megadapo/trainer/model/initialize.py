"""The weights a model starts with: those of its folder, or random ones.

Random weights do not depend on the split: each tensor is drawn whole, by name, then cut.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from megadapo.models.description import ModelDescription
from megadapo.trainer.types import TrainerSettings
from megadapo.weights.disk.load import fill_shard, import_weights, match_params
from megadapo.weights.layout.layout import ModelLayout
from megadapo.weights.layout.shards import ShardPosition

_WRITES_TO_RESIDUAL = ("o_proj.weight", "down_proj.weight")


def set_first_weights(
    params: Mapping[str, Tensor],
    layout: ModelLayout,
    position: ShardPosition,
    *,
    settings: TrainerSettings,
    description: ModelDescription,
    folder: Path,
) -> None:
    """Fill the policy's parameters, unless a checkpoint's will be all that is read of them.

    Args:
        params: Megatron names with global layer numbers -> this rank's shard.
        folder: the model's.
    """
    keeps_first = settings.objective.kl_coef != 0.0 and settings.reference.kind == "fixed"
    if not (settings.reads_weights or keeps_first):
        return
    if settings.model.init == "pretrained":
        import_weights(folder, params, layout, position)
    else:
        std = description.initializer_range
        initialize_randomly(params, layout, position, std=std, seed=settings.seed)


def initialize_randomly(
    params: Mapping[str, Tensor],
    layout: ModelLayout,
    position: ShardPosition,
    *,
    std: float,
    seed: int,
) -> None:
    """Fill this rank's parameters in place; padded vocabulary rows become 0.

    Args:
        params: Megatron names with global layer numbers -> this rank's shard.
        std: standard deviation of the matrices (`initializer_range` of the model's config).
    """
    source = RandomTensors(layout, std=std, seed=seed)
    for shard, param in match_params(params, layout, position):
        fill_shard(param, shard, source)


class RandomTensors:
    """A source of full tensors that are drawn when they are asked for.

    Matrices are normal, those that write to the residual stream smaller by sqrt(2 x layers)
    (GPT-2's rule); norms are 1 and biases 0. The seed of a tensor is its name and the run's seed.
    """

    def __init__(self, layout: ModelLayout, *, std: float, seed: int) -> None:
        self.shapes = layout.hf_shapes
        self.dtypes = dict.fromkeys(self.shapes, torch.float32)
        self._std = std
        self._residual_std = std / math.sqrt(2 * layout.shape.num_layers)
        self._seed = seed
        # a fused parameter asks for the same few tensors again and again
        self._whole = lru_cache(maxsize=4)(self._draw)

    def read(self, name: str, axis: int, start: int, stop: int) -> Tensor:
        """Positions `start` to `stop` along `axis` of one tensor."""
        return self._whole(name).narrow(axis, start, stop - start)

    def _draw(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        std = self._residual_std if name.endswith(_WRITES_TO_RESIDUAL) else self._std
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.empty(shape).normal_(0.0, std, generator=generator)
