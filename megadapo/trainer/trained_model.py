"""A model of one rank with its gradient buffers and optimizer: the policy or the critic."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megadapo.models.description import ModelDescription
from megadapo.trainer.config import OptimizerConfig, TrainerConfig
from megadapo.trainer.model.model import transformer_config
from megadapo.trainer.model.parallel import parameters_by_global_name, shard_position
from megadapo.trainer.types import TrainerSettings
from megadapo.trainer.update.optimizer import build_optimizer, finalize_sums, wrap_for_gradients
from megadapo.weights.layout.layout import ModelLayout

BuildChunks = Callable[[TransformerConfig, ModelDescription, TrainerConfig], list[GPTModel]]


class TrainedModel:
    """This rank's part of a model, with its optimizer."""

    def __init__(
        self,
        settings: TrainerSettings,
        model: ModelDescription,
        optimizer: OptimizerConfig,
        *,
        build_chunks: BuildChunks,
        set_weights: Callable[[], None],
    ) -> None:
        """Build chunks in model order, let `set_weights` fill `parameters`, add the optimizer."""
        self.model = model
        self.layout = ModelLayout(model.family, model.shape)
        dtype = getattr(torch, settings.model.dtype)
        self.config = transformer_config(model, settings.trainer, dtype=dtype)
        self.config.finalize_model_grads_func = finalize_sums
        chunks = build_chunks(self.config, model, settings.trainer)
        self.position = shard_position(chunks, settings.trainer)
        self.parameters = parameters_by_global_name(chunks)
        # megatron-core copies weights into its buffers and masters, so they must be set before
        set_weights()
        self.chunks = wrap_for_gradients(chunks, self.config, settings.trainer)
        self.optimizer = build_optimizer(self.chunks, optimizer)
