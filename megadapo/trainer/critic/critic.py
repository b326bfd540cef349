"""The critic of one rank: its part of the model, its optimizer, and what can be asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor
from torch.profiler import record_function

from megadapo.errors import CheckpointError
from megadapo.models.description import ModelDescription
from megadapo.models.folder import read_hf_config, resolve_model_folder
from megadapo.models.value_model import describe_critic
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.checkpoint.checkpoint import Snapshot, load_checkpoint, take_snapshot
from megadapo.trainer.critic.sums import CriticSums
from megadapo.trainer.critic.value_loss import ValueLoss, ValueTargets, ValueTask
from megadapo.trainer.critic.value_model import build_value_chunks, set_value_weights
from megadapo.trainer.model.initialize import RandomTensors
from megadapo.trainer.model.model import transformer_config
from megadapo.trainer.model.model_layout import validate_critic, validate_model_layout
from megadapo.trainer.model.position import parameters_by_global_name, shard_position
from megadapo.trainer.settings import CRITIC_FOLDER, TrainerSettings
from megadapo.trainer.update.gradient_buffers import wrap_for_gradients
from megadapo.trainer.update.optimizer import build_optimizer
from megadapo.trainer.update.step import finalize_sums, run_schedule
from megadapo.weights.disk.megatron_folder import open_source
from megadapo.weights.layout.layout import ModelLayout


class Critic:
    """Model and optimizer; every method is collective over the trainer's ranks."""

    def __init__(
        self, settings: TrainerSettings, *, policy: ModelDescription, device: torch.device
    ) -> None:
        """`policy`: whose micro-batches it reads."""
        assert settings.critic is not None, "whoever makes one has its section"
        self.settings, self.section, self.device = settings, settings.critic, device
        folder = resolve_model_folder(
            self.section.path or settings.model.path,
            with_weights=settings.model.init == "pretrained",
            key="critic.path",
        )
        self.model = describe_critic(read_hf_config(folder))
        validate_critic(self.model, policy)
        validate_model_layout(self.model, settings.trainer)
        self.layout = ModelLayout(self.model.family, self.model.shape)
        config = transformer_config(
            self.model, settings.trainer, dtype=getattr(torch, settings.model.dtype)
        )
        config.finalize_model_grads_func = finalize_sums
        chunks = build_value_chunks(config, self.model, settings.trainer)
        self.position = shard_position(chunks, settings.trainer)
        self.parameters = parameters_by_global_name(chunks)
        self._set_weights(folder)
        self.chunks: list[DistributedDataParallel] = wrap_for_gradients(
            chunks, config, settings.trainer
        )
        self.optimizer = build_optimizer(self.chunks, self.section.optimizer)
        self.head = ValueLoss(value_clip=self.section.value_clip)

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Values [T] of each micro-batch on the last pipeline stage; elsewhere an empty list."""
        tasks = [ValueTask(micro_batch=part, targets=None) for part in micro_batches]
        with torch.no_grad(), record_function("megadapo::values"):
            return run_schedule(self.chunks, self.head, tasks, forward_only=True)

    @record_function("megadapo::value_gradients")
    def gradients(
        self, micro_batches: Sequence[MicroBatch], targets: Sequence[ValueTargets]
    ) -> CriticSums:
        """Leave the mini-batch's summed gradients in the buffers; returns this rank's sums.

        Args:
            targets: of each micro-batch; empty except on the last pipeline stage.
        """
        nothing = ValueTargets(values_old=torch.empty(0), returns=torch.empty(0))
        tasks = [
            ValueTask(micro_batch=micro_batch, targets=wanted)
            for micro_batch, wanted in zip(
                micro_batches, targets or [nothing] * len(micro_batches), strict=True
            )
        ]
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        outputs = run_schedule(self.chunks, self.head, tasks, forward_only=False)
        sums = CriticSums()
        for output, wanted in zip(outputs, targets, strict=True):
            sums.add(wanted.values_old, wanted.returns)
            sums.loss += output.loss.item()
            sums.clipped += output.clipped.item()
        return sums

    def snapshot(self, number: int) -> Snapshot:
        """Copy weights and optimizer; `number`: of the save."""
        return take_snapshot(self.chunks, self.optimizer, number=number)

    def load(self, folder: Path) -> None:
        """Read what a snapshot was written as, at whatever split it was written.

        Raises:
            CheckpointError: there is no critic in it, it is damaged, or of another model.
        """
        if not (folder / CRITIC_FOLDER).is_dir():
            raise CheckpointError(
                f"{folder} was written without a critic, which "
                'algorithm.advantage = "gae" needs: go on with the advantage it was trained with, '
                "or begin a run from its export"
            )
        load_checkpoint(self.chunks, self.optimizer, folder / CRITIC_FOLDER)

    def _set_weights(self, folder: Path) -> None:
        if not self.settings.reads_weights:
            return
        if self.settings.model.init == "pretrained":
            source = open_source(folder)
        else:
            source = RandomTensors(
                self.layout, std=self.model.initializer_range, seed=self.settings.seed
            )
        set_value_weights(source, folder, self.parameters, self.layout, self.position)
