"""One rank of the trainer: its part of the model, the optimizer, and what is kept of them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from megadapo.data.batch import PackedBatch
from megadapo.models.description import describe_model
from megadapo.models.folder import read_hf_config, resolve_model_folder
from megadapo.trainer.batch.micro_batch import MicroBatch, MicroBatchBuilder
from megadapo.trainer.batch.mini_batch import MiniBatchCutter
from megadapo.trainer.checkpoint.checkpoint import (
    CheckpointWriter,
    load_checkpoint,
    num_bytes_written,
    take_snapshot,
)
from megadapo.trainer.critic.critic import Critic
from megadapo.trainer.model.cpu_platform import CPU
from megadapo.trainer.model.experts import ExpertBalance
from megadapo.trainer.model.head import PolicyHead
from megadapo.trainer.model.initialize import set_first_weights
from megadapo.trainer.model.model import build_chunks, rotary_of_own_layers, transformer_config
from megadapo.trainer.model.model_layout import validate_model_layout
from megadapo.trainer.model.parallel import (
    context_part,
    join_groups,
    leave_groups,
    parameters_by_global_name,
    shard_position,
)
from megadapo.trainer.model.router_replay import check_choices
from megadapo.trainer.offload import Kind, Offload, TrainedModel
from megadapo.trainer.reference import ReferencePolicy
from megadapo.trainer.types import CRITIC_FOLDER, Rendezvous, TrainerSettings
from megadapo.trainer.update.optimizer import build_optimizer, wait_for_weight, wrap_for_gradients
from megadapo.trainer.update.step import compute_logprobs, finalize_sums
from megadapo.weights.disk.export import export_weights
from megadapo.weights.disk.files import Files
from megadapo.weights.disk.gather import ProcessGroups, gather_weights
from megadapo.weights.layout.layout import ModelLayout
from megadapo.weights.sync.sender import HeldWeightSender, WeightSender

BETWEEN_UPDATES: tuple[Kind, Kind] = ("gradients", "optimizer")
"""What may leave the device when a step's updates are done."""


class TrainerRank:
    """Model and optimizer of one rank. Every method but the properties is collective."""

    def __init__(
        self,
        settings: TrainerSettings,
        rendezvous: Rendezvous,
        listener: socket.socket | None = None,
    ) -> None:
        """`listener`: rank 0's open socket at the rendezvous; None makes it open one."""
        self.settings = settings
        self.model_folder = resolve_model_folder(
            settings.model.path, with_weights=settings.model.init == "pretrained"
        )
        self.model = describe_model(read_hf_config(self.model_folder))
        validate_model_layout(self.model, settings.trainer)
        dtype = getattr(torch, settings.model.dtype)
        self.config = transformer_config(self.model, settings.trainer, dtype=dtype)
        join_groups(rendezvous, settings.trainer, listener, seed=settings.seed)
        self.device = _device()
        self.config.finalize_model_grads_func = finalize_sums
        chunks = build_chunks(self.config, self.model, settings.trainer)
        self.layout = ModelLayout(self.model.family, self.model.shape)
        self.position = shard_position(chunks, settings.trainer)
        self.groups = ProcessGroups(
            tp=mpu.get_tensor_model_parallel_group(),
            pp=mpu.get_pipeline_model_parallel_group(),
            ep=mpu.get_expert_model_parallel_group(),
            etp=mpu.get_expert_tensor_parallel_group(),
        )
        self.parameters = parameters_by_global_name(chunks)
        set_first_weights(
            self.parameters,
            self.layout,
            self.position,
            settings=settings,
            description=self.model,
            folder=self.model_folder,
        )
        # megatron-core copies weights into its buffers and masters here: they must be set before
        self.chunks = wrap_for_gradients(chunks, self.config, settings.trainer)
        self.optimizer = build_optimizer(self.chunks, settings.trainer.optimizer)
        self.experts = ExpertBalance(self.chunks, coef=settings.trainer.router_aux_loss_coef)
        self.reference = (
            ReferencePolicy(settings.reference, self.chunks, self.parameters)
            if settings.objective.kl_coef != 0.0
            else None
        )
        self.critic: Critic | None = None
        if settings.critic is not None:
            self.critic = Critic(settings, policy=self.model, device=self.device)
        self.writer = CheckpointWriter(torch.distributed.get_rank())
        self.head = PolicyHead(
            objective=settings.objective,
            temperature=settings.temperature,
            vocab_size=self.layout.shape.vocab_size,
            wait_for_weight=partial(wait_for_weight, self.chunks[-1]),
        )
        models = [TrainedModel(self.chunks, self.optimizer)]
        if self.critic is not None:
            models.append(TrainedModel(self.critic.chunks, self.critic.optimizer))
        self.offload = Offload(settings.trainer.offload, models, self.device)
        self.offload.leave(*BETWEEN_UPDATES)
        shards = (self.parameters, self.layout, self.position, torch.distributed.get_rank())
        present = self.offload.present_weights
        self.weight_sender = WeightSender(*shards, present=present)
        self.held_sender = HeldWeightSender(*shards, present=present)
        self.cutter = MiniBatchCutter(
            MicroBatchBuilder(
                inverse_frequencies=rotary_of_own_layers(self.model),
                token_multiple=settings.trainer.tensor_parallel,
                part=context_part(),
                takes_experts=settings.trainer.router_replay,
            ),
            settings.trainer,
            hidden_size=self.layout.shape.hidden_size,
            device=self.device,
        )

    def logprobs(self, batch: PackedBatch) -> np.ndarray | None:
        """[T] fp32 log-probs of the response tokens this rank computed, NaN elsewhere.

        None on ranks that compute none or the same as another.
        """
        self.check_experts(batch)
        result = np.full(len(batch.tokens), np.nan, dtype=np.float32)
        with self.offload.present("parameters"):
            for micro_batches in self.cutter.cut_responses(batch):
                computed = self.logprobs_of(micro_batches)
                for micro_batch, values in zip(micro_batches, computed, strict=False):
                    result[micro_batch.source] = values[micro_batch.rows].cpu().numpy()
        return result if self.has_results else None

    def begin_save(self, folder: Path) -> int:
        """Copy weights and optimizer to the host and begin to write them; returns the bytes.

        Any other split can load them. Training may go on; `writer.report` says what has become of
        it.
        """
        number = self.writer.num_begun
        with self.offload.present("parameters", "optimizer"):
            snapshots = {"": take_snapshot(self.chunks, self.optimizer, number=number)}
            if self.critic is not None:
                snapshots[CRITIC_FOLDER] = self.critic.snapshot(number)
        others: list[Callable[[Path], Files]] = []
        if self.reference is not None:
            others = [self.reference.snapshot(self.layout, self.position, self.model_folder)]
        num_bytes = sum(snapshot.num_bytes for snapshot in snapshots.values())
        self.writer.begin(folder, snapshots, others)
        return num_bytes

    def checkpoint_bytes(self) -> int:
        """What this rank writes into a checkpoint, a reference policy's weights left out."""
        with self.offload.present("parameters", "optimizer"):
            num_bytes = num_bytes_written(self.chunks, self.optimizer)
            if self.critic is not None:
                num_bytes += num_bytes_written(self.critic.chunks, self.critic.optimizer)
        return num_bytes

    def load(self, folder: Path) -> None:
        """Read what was saved, at whatever split it was written.

        Raises:
            CheckpointError: it is damaged, or of another model.
        """
        with self.offload.present("parameters", "optimizer"):
            load_checkpoint(self.chunks, self.optimizer, folder)
            if self.reference is not None:
                self.reference.load(folder, self.layout, self.position)
            if self.critic is not None:
                self.critic.load(folder)

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder with the present weights, from the first rank."""
        with self.offload.present("parameters"):
            tensors = gather_weights(self.parameters, self.layout, self.position, self.groups)
            if torch.distributed.get_rank() == 0:
                export_weights(
                    tensors,
                    folder,
                    layout=self.layout,
                    dtype=self.config.params_dtype,
                    base_folder=self.model_folder,
                )
            else:
                for _ in tensors:  # the gathering is collective
                    pass
        torch.distributed.barrier()

    def leave_to_engines(self) -> None:
        """Free what engines on the same GPU may have while they generate."""
        self.offload.leave("parameters", *BETWEEN_UPDATES)

    def leave(self) -> None:
        """Take the process groups apart."""
        leave_groups()

    @property
    def has_results(self) -> bool:
        """Whether this rank's sums count: one tensor-parallel rank of each last stage, of which
        context-parallel ranks have different tokens."""
        return bool(mpu.is_pipeline_last_stage() and mpu.get_tensor_model_parallel_rank() == 0)

    @property
    def data_parallel_rank(self) -> int:
        """Which of the ranks with the same weights this is, context-parallel ones among them."""
        return int(mpu.get_data_parallel_rank(with_context_parallel=True))

    def logprobs_of(
        self, micro_batches: Sequence[MicroBatch], *, replays: bool = True
    ) -> list[Tensor]:
        with torch.no_grad():
            return compute_logprobs(self.chunks, self.head, micro_batches, replays=replays)

    def check_experts(self, batch: PackedBatch) -> None:
        """With `trainer.router_replay`, see that a batch has the experts that routers take over.

        Raises:
            DataError: it has not.
        """
        if self.settings.trainer.router_replay:
            check_choices(batch, self.model)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU
