"""A model of one rank: a teacher, or with gradient buffers and optimizer the policy or critic."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megadapo.models.description import ModelDescription
from megadapo.trainer.checkpoint.pieces import owned_runs
from megadapo.trainer.config import OptimizerConfig
from megadapo.trainer.model.model import build_chunks, transformer_config
from megadapo.trainer.model.model_layout import rank_positions
from megadapo.trainer.model.parallel import parameters_by_global_name
from megadapo.trainer.types import TrainerSettings
from megadapo.trainer.update.optimizer import build_optimizer, finalize_sums, wrap_for_gradients
from megadapo.weights.disk.sources import TensorSource, fill_shard, match_params, open_weights
from megadapo.weights.layout.layout import ModelLayout

WRITES_TO_RESIDUAL = ("o_proj.weight", "down_proj.weight")
"""Ends of the names of matrices whose output is added to the residual stream."""
DRAWN_AT_ONCE = 1 << 16
"""Random numbers that a GPU draws at once. Every GPU with 256 blocks of 256 threads draws the same;
the numbers of a larger draw depend on how many threads the GPU has."""


class RankModel:
    """This rank's part of a model, for forward passes."""

    def __init__(
        self,
        settings: TrainerSettings,
        model: ModelDescription,
        folder: Path,
        *,
        needs_weights: bool,
    ) -> None:
        """Build the model.

        Args:
            folder: of the first weights, unless settings.model.init is "random".
            needs_weights: whether they are set; a checkpoint is loaded next otherwise.
        """
        self.settings, self.model, self.model_folder = settings, model, folder
        self.layout = ModelLayout(model.family, model.shape)
        dtype = getattr(torch, settings.model.dtype)
        self.config = transformer_config(model, settings.trainer, dtype=dtype)
        self.chunks = self.build_chunks()
        positions = rank_positions(self.layout, settings.trainer)
        self.position = positions[torch.distributed.get_rank()]
        self.parameters = parameters_by_global_name(self.chunks)
        if needs_weights:
            source = self.first_weights()
            for shard, param in match_params(self.parameters, self.layout, self.position):
                fill_shard(param, shard, source)

    def build_chunks(self) -> list[GPTModel]:
        """Return this rank's chunks in model order; their weights are not set yet."""
        return build_chunks(self.config, self.model, self.settings.trainer)

    def first_weights(self) -> TensorSource:
        """Return the full tensors with which the run starts."""
        if self.settings.model.init == "pretrained":
            return open_weights(self.model_folder, self.layout)
        std = self.model.initializer_range
        device = next(iter(self.parameters.values())).device
        return RandomTensors(self.layout, std=std, seed=self.settings.seed, device=device)


class TrainedModel(RankModel):
    """This rank's part of a model, with its optimizer."""

    def __init__(
        self,
        settings: TrainerSettings,
        model: ModelDescription,
        optimizer: OptimizerConfig,
        folder: Path,
        *,
        needs_weights: bool,
    ) -> None:
        # megatron-core copies weights into its buffers and masters, so they must be set before
        super().__init__(settings, model, folder, needs_weights=needs_weights)
        self.config.finalize_model_grads_func = finalize_sums
        self.chunks = wrap_for_gradients(self.chunks, self.config, settings.trainer)
        self.optimizer = build_optimizer(self.chunks, optimizer)
        # found while nothing is offloaded: views of empty storages cannot be made
        self.runs = owned_runs(self.chunks, self.optimizer)


class RandomTensors:
    """A source of full tensors that are drawn on demand on a device.

    Matrices are normal with `std`. Matrices that write to the residual stream are smaller by
    sqrt(2 x layers), GPT-2's rule. Norms are 1 and biases 0. A tensor's seed is made of its name
    and the run's seed. A GPU draws other numbers than a CPU. At most four tensors are kept.
    """

    def __init__(self, layout: ModelLayout, *, std: float, seed: int, device: torch.device) -> None:
        self.shapes = layout.hf_shapes
        self.dtypes = dict.fromkeys(self.shapes, torch.float32)
        residual_std = std / math.sqrt(2 * layout.shape.num_layers)
        stds = {
            name: residual_std if name.endswith(WRITES_TO_RESIDUAL) else std for name in self.shapes
        }
        # a fused parameter reads the same few tensors several times; a method of this object
        # would keep them on the device until the next garbage collection
        self._whole = lru_cache(maxsize=4)(partial(_drawn, self.shapes, stds, seed, device))

    def read(self, name: str, axis: int, start: int, stop: int) -> Tensor:
        """Return positions `start` to `stop` along `axis` of one tensor."""
        return self._whole(name).narrow(axis, start, stop - start)


def _drawn(
    shapes: Mapping[str, tuple[int, ...]],
    stds: Mapping[str, float],
    seed: int,
    device: torch.device,
    name: str,
) -> Tensor:
    shape = shapes[name]
    if len(shape) == 1:
        make = torch.zeros if name.endswith("bias") else torch.ones
        return make(shape, device=device)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    whole = torch.empty(shape, device=device)
    for part in [whole] if device.type == "cpu" else whole.view(-1).split(DRAWN_AT_ONCE):
        part.normal_(0.0, stds[name], generator=generator)
    return whole
