"""One rank of the trainer: its part of the model, the optimizer, and what can be asked of it."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megadapo.data.batch import PackedBatch
from megadapo.trainer.checkpointing import load_checkpoint, save_checkpoint
from megadapo.trainer.config import validate_model_layout
from megadapo.trainer.cpu_platform import CPU
from megadapo.trainer.head import PolicyHead
from megadapo.trainer.initialize import initialize_randomly
from megadapo.trainer.metrics import summarize
from megadapo.trainer.micro_batch import (
    MicroBatch,
    MicroBatchBuilder,
    response_tokens,
    trained_tokens,
)
from megadapo.trainer.model import (
    build_model,
    inverse_frequencies,
    read_hf_config,
    resolve_model_folder,
    transformer_config,
)
from megadapo.trainer.optimizer import build_optimizer, step_if_finite, wrap_for_gradients
from megadapo.trainer.parallel import join_groups, leave_groups
from megadapo.trainer.partition import partition
from megadapo.trainer.result import UpdateResult
from megadapo.trainer.settings import Rendezvous, TrainerSettings
from megadapo.trainer.step import compute_gradients, compute_logprobs, finalize_sums
from megadapo.weights.export import export_weights
from megadapo.weights.gather import ProcessGroups, gather_weights
from megadapo.weights.layout import ShardPosition, layout_for
from megadapo.weights.load import import_weights
from megadapo.weights.sender import WeightSender


class TrainerRank:
    """Model, optimizer and step of one rank. Every method but the properties is collective."""

    def __init__(
        self,
        settings: TrainerSettings,
        rendezvous: Rendezvous,
        listener: socket.socket | None = None,
    ) -> None:
        """`listener`: rank 0's open socket at the rendezvous; None makes it open one."""
        self.settings = settings
        self.hf_config = read_hf_config(settings.model)
        validate_model_layout(self.hf_config, settings.trainer)
        self.config = transformer_config(self.hf_config, settings.model, settings.trainer)
        join_groups(rendezvous, settings.trainer, listener, seed=settings.seed)
        self.device = _device()
        self.config.finalize_model_grads_func = finalize_sums
        model = build_model(self.config, self.hf_config, settings.trainer)
        self.layout = layout_for(self.hf_config)
        self.position = _position(self.config, model.vocab_size)
        self.groups = ProcessGroups(
            tp=mpu.get_tensor_model_parallel_group(), pp=mpu.get_pipeline_model_parallel_group()
        )
        self.parameters = _by_global_name(model, self.position)
        self._set_weights()
        # megatron-core copies weights into its buffers and masters here: they must be set before
        self.model = wrap_for_gradients(model, self.config)
        self.optimizer = build_optimizer(self.model, settings.trainer.optimizer)
        self.head = PolicyHead(
            objective=settings.objective,
            temperature=settings.temperature,
            vocab_size=self.layout.shape.vocab_size,
        )
        self.weight_sender = WeightSender(
            self.parameters, self.layout, self.position, torch.distributed.get_rank()
        )
        self._builder = MicroBatchBuilder(
            inverse_frequencies=inverse_frequencies(self.hf_config),
            token_multiple=settings.trainer.tensor_parallel,
            device=self.device,
        )

    def update(self, batch: PackedBatch, *, policy_version: int, step: int) -> UpdateResult:
        """All mini-batches of one rollout step, one optimizer update each.

        Old log-probs are taken for the whole batch before the first update, in the micro-batches
        of the updates.

        Args:
            policy_version: of the present weights, to find the tokens they sampled.
            step: rollout step, which decides the learning rate; the first is 1.

        Returns:
            The same numbers on every rank.
        """
        lr = self.settings.trainer.optimizer.lr_at(step)
        predicted, num_dropped = trained_tokens(batch)
        cut = [
            self.micro_batches(batch, indices, predicted, policy_version)
            for indices in batch.mini_batches
        ]
        old = [self.logprobs_of(micro_batches) for micro_batches in cut]
        reduced, grad_norms = [], []
        for micro_batches, logprobs_old in zip(cut, old, strict=True):
            sums = compute_gradients(self.model, self.head, micro_batches, logprobs_old)
            sums = sums.reduced(contributes=self.has_results, device=self.device)
            outcome = step_if_finite(self.optimizer, loss=sums.loss, lr=lr)
            reduced.append(sums)
            if outcome.applied:
                grad_norms.append(outcome.grad_norm)
        return summarize(
            reduced,
            grad_norms=grad_norms,
            skipped_updates=len(cut) - len(grad_norms),
            num_dropped_tokens=num_dropped,
            lr=lr,
        )

    def logprobs(self, batch: PackedBatch) -> np.ndarray | None:
        """[T] fp32 log-probs of the response tokens this rank computed, NaN elsewhere.

        None on ranks that compute none or the same as another.
        """
        predicted = response_tokens(batch)
        result = np.full(len(batch.tokens), np.nan, dtype=np.float32)
        for indices in batch.mini_batches:
            micro_batches = self.micro_batches(batch, indices, predicted, None)
            computed = self.logprobs_of(micro_batches)
            for micro_batch, values in zip(micro_batches, computed, strict=False):
                result[micro_batch.source] = values[micro_batch.rows].cpu().numpy()
        return result if self.has_results else None

    def save(self, folder: Path) -> None:
        """Write weights and optimizer so that any other split can load them."""
        save_checkpoint(self.model, self.optimizer, folder)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, at whatever split it was written.

        Raises:
            CheckpointError: it is damaged, or of another model.
        """
        load_checkpoint(self.model, self.optimizer, folder)

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder with the present weights, from the first rank."""
        tensors = gather_weights(self.parameters, self.layout, self.position, self.groups)
        if torch.distributed.get_rank() == 0:
            export_weights(
                tensors,
                folder,
                layout=self.layout,
                dtype=self.config.params_dtype,
                base_folder=resolve_model_folder(self.settings.model),
            )
        else:
            for _ in tensors:  # the gathering is collective
                pass
        torch.distributed.barrier()

    def leave(self) -> None:
        """Take the process groups apart."""
        leave_groups()

    @property
    def has_results(self) -> bool:
        """Whether this rank's sums count: one tensor-parallel rank of each last stage."""
        return mpu.is_pipeline_last_stage() and mpu.get_tensor_model_parallel_rank() == 0

    def logprobs_of(self, micro_batches: list[MicroBatch]) -> list[Tensor]:
        with torch.no_grad():
            return compute_logprobs(self.model, self.head, micro_batches)

    def micro_batches(
        self,
        batch: PackedBatch,
        indices: np.ndarray,
        predicted: np.ndarray,
        policy_version: int | None,
    ) -> list[MicroBatch]:
        """This data-parallel rank's micro-batches of one mini-batch."""
        shares = partition(
            np.diff(batch.cu_seqlens)[indices].tolist(),
            num_ranks=self.settings.trainer.data_parallel,
            token_budget=self.settings.trainer.tokens_per_micro_batch,
            hidden_size=self.layout.shape.hidden_size,
        )
        return [
            self._builder.build(
                batch, indices[members], predicted=predicted, policy_version=policy_version
            )
            for members in shares[mpu.get_data_parallel_rank()]
        ]

    def _set_weights(self) -> None:
        if self.settings.model.init == "pretrained":
            folder = resolve_model_folder(self.settings.model)
            import_weights(folder, self.parameters, self.layout, self.position)
            return
        initialize_randomly(
            self.parameters,
            self.layout,
            self.position,
            std=self.hf_config.get("initializer_range", 0.02),
            seed=self.settings.seed,
        )


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def _position(config: TransformerConfig, padded_vocab_size: int) -> ShardPosition:
    first = get_transformer_layer_offset(config)
    num_layers = config.num_layers // config.pipeline_model_parallel_size
    return ShardPosition(
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        tp_size=mpu.get_tensor_model_parallel_world_size(),
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        pp_size=mpu.get_pipeline_model_parallel_world_size(),
        layer_indices=tuple(range(first, first + num_layers)),
        has_embedding=mpu.is_pipeline_first_stage(),
        has_head=mpu.is_pipeline_last_stage(),
        padded_vocab_size=padded_vocab_size,
    )


def _by_global_name(model: torch.nn.Module, position: ShardPosition) -> dict[str, Tensor]:
    """Parameters by name, with layers numbered over the whole model instead of the stage."""

    def global_name(name: str) -> str:
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(position.layer_indices[int(parts[2])])
        return ".".join(parts)

    return {global_name(name): param for name, param in model.named_parameters()}
