"""Random first weights. They do not depend on the split: tensors are drawn whole, by name."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from megadapo.weights.disk.load import fill_shard, match_params
from megadapo.weights.disk.sources import TensorSource
from megadapo.weights.layout.layout import ModelLayout
from megadapo.weights.layout.shards import ShardPosition

_WRITES_TO_RESIDUAL = ("o_proj.weight", "down_proj.weight")


def fill_shards(
    params: Mapping[str, Tensor], layout: ModelLayout, position: ShardPosition, source: TensorSource
) -> None:
    """Fill this rank's parameters in place; padded vocabulary rows become 0.

    Args:
        params: Megatron names with global layer numbers -> this rank's shard.
    """
    for shard, param in match_params(params, layout, position):
        fill_shard(param, shard, source)


class RandomTensors:
    """A source of full tensors that are drawn on demand.

    Matrices are normal with `std`. Matrices that write to the residual stream are smaller by
    sqrt(2 x layers), GPT-2's rule. Norms are 1 and biases 0. A tensor's seed is made of its name
    and the run's seed.
    """

    def __init__(self, layout: ModelLayout, *, std: float, seed: int) -> None:
        self.shapes = layout.hf_shapes
        self.dtypes = dict.fromkeys(self.shapes, torch.float32)
        self._std = std
        self._residual_std = std / math.sqrt(2 * layout.shape.num_layers)
        self._seed = seed
        # a fused parameter reads the same few tensors several times
        self._whole = lru_cache(maxsize=4)(self._draw)

    def read(self, name: str, axis: int, start: int, stop: int) -> Tensor:
        """Return positions `start` to `stop` along `axis` of one tensor."""
        return self._whole(name).narrow(axis, start, stop - start)

    def _draw(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        std = self._residual_std if name.endswith(_WRITES_TO_RESIDUAL) else self._std
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.empty(shape).normal_(0.0, std, generator=generator)
