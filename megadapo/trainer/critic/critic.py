"""The critic of one rank: its part of the model, its optimizer, and sums over its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import record_function

from megadapo.errors import CheckpointError
from megadapo.models.description import ModelDescription, describe_critic
from megadapo.models.folder import read_hf_config, resolve_model_folder
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.checkpoint.checkpoint import Snapshot, load_checkpoint, take_snapshot
from megadapo.trainer.critic.value_model import (
    ValueLoss,
    ValueTargets,
    ValueTask,
    build_value_chunks,
    set_value_weights,
)
from megadapo.trainer.model.initialize import RandomTensors
from megadapo.trainer.model.model_layout import validate_critic, validate_model_layout
from megadapo.trainer.trained_model import TrainedModel
from megadapo.trainer.types import CRITIC_FOLDER, CriticResult, TrainerSettings
from megadapo.trainer.update.step import run_schedule
from megadapo.weights.disk.sources import open_source


class Critic(TrainedModel):
    """Model and optimizer of the critic; every method is collective over the trainer's ranks."""

    def __init__(
        self, settings: TrainerSettings, *, policy: ModelDescription, device: torch.device
    ) -> None:
        """`policy`: its micro-batches are the critic's input."""
        assert settings.critic is not None, "a critic needs its section"
        self.settings, self.section, self.device = settings, settings.critic, device
        self._folder = resolve_model_folder(
            self.section.path or settings.model.path,
            with_weights=settings.model.init == "pretrained",
            key="critic.path",
        )
        model = describe_critic(read_hf_config(self._folder))
        validate_critic(model, policy)
        validate_model_layout(model, settings.trainer)
        self.optimizer_config = self.section.optimizer.completed_by(settings.trainer.optimizer)
        super().__init__(
            settings,
            model,
            self.optimizer_config,
            build_chunks=build_value_chunks,
            set_weights=self._set_weights,
        )
        self.head = ValueLoss(value_clip=self.section.value_clip)

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return values [T] of each micro-batch on the last pipeline stage, else an empty list."""
        tasks = [ValueTask(micro_batch=part, targets=None) for part in micro_batches]
        with torch.no_grad(), record_function("megadapo::values"):
            return run_schedule(self.chunks, self.head, tasks, forward_only=True)

    @record_function("megadapo::value_gradients")
    def gradients(
        self, micro_batches: Sequence[MicroBatch], targets: Sequence[ValueTargets]
    ) -> CriticSums:
        """Leave the mini-batch's summed gradients in the buffers; return this rank's sums.

        Args:
            targets: of each micro-batch; empty except on the last pipeline stage.
        """
        unused = ValueTargets(values_old=torch.empty(0), returns=torch.empty(0))
        tasks = [
            ValueTask(micro_batch=micro_batch, targets=wanted)
            for micro_batch, wanted in zip(
                micro_batches, targets or [unused] * len(micro_batches), strict=True
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
        """Read the critic from a trainer's checkpoint of any split.

        Raises:
            CheckpointError: the checkpoint has no critic, is damaged, or of another model.
        """
        if not (folder / CRITIC_FOLDER).is_dir():
            raise CheckpointError(
                f"{folder} was written without a critic, which "
                'algorithm.advantage = "gae" needs: continue with the advantage it was trained '
                "with, or start a run from its export"
            )
        load_checkpoint(self.chunks, self.optimizer, folder / CRITIC_FOLDER)

    def _set_weights(self) -> None:
        if not self.settings.reads_weights:
            return
        if self.settings.model.init == "pretrained":
            source = open_source(self._folder)
        else:
            source = RandomTensors(
                self.layout, std=self.model.initializer_range, seed=self.settings.seed
            )
        set_value_weights(source, self._folder, self.parameters, self.layout, self.position)


@dataclass(kw_only=True)
class CriticSums:
    """Sums over the trained tokens of one mini-batch."""

    loss: float = 0.0
    num_tokens: float = 0.0
    clipped: float = 0.0
    values: float = 0.0
    returns: float = 0.0
    squared_returns: float = 0.0
    errors: float = 0.0
    squared_errors: float = 0.0

    def add(self, values: Tensor, returns: Tensor) -> None:
        """Count tokens; `values` [R] are from before the step's first update, as `returns` [R]."""
        values, returns = values.double(), returns.double()
        errors = returns - values
        self.num_tokens += len(values)
        self.values += values.sum().item()
        self.returns += returns.sum().item()
        self.squared_returns += returns.square().sum().item()
        self.errors += errors.sum().item()
        self.squared_errors += errors.square().sum().item()

    def reduced(self, *, contributes: bool, device: torch.device) -> CriticSums:
        """Return the sums over the ranks that contribute; collective, the same on all ranks."""
        own = astuple(self if contributes else CriticSums())
        total = torch.tensor(own, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(total)
        return CriticSums(
            **dict(zip((field.name for field in fields(self)), total.tolist(), strict=True))
        )


def summarize_critic(
    mini_batches: Sequence[CriticSums], *, grad_norms: Sequence[float], lr: float
) -> CriticResult:
    """Return the critic's numbers of a step from its mini-batches' reduced sums.

    Args:
        grad_norms: of the applied updates.
    """
    total = CriticSums(
        **{
            field.name: sum(getattr(sums, field.name) for sums in mini_batches)
            for field in fields(CriticSums)
        }
    )
    tokens = total.num_tokens
    if not tokens:
        return CriticResult(lr=lr)
    return CriticResult(
        loss=total.loss / len(mini_batches),
        explained_variance=_explained_variance(total),
        value_mean=total.values / tokens,
        return_mean=total.returns / tokens,
        clip_fraction=total.clipped / tokens,
        grad_norm=sum(grad_norms) / len(grad_norms) if grad_norms else None,
        lr=lr,
        skipped_updates=len(mini_batches) - len(grad_norms),
    )


def _explained_variance(sums: CriticSums) -> float | None:
    """Return 1 - Var(returns - values) / Var(returns); None if all returns are equal."""
    tokens = sums.num_tokens
    of_returns = sums.squared_returns / tokens - (sums.returns / tokens) ** 2
    of_errors = sums.squared_errors / tokens - (sums.errors / tokens) ** 2
    # the difference of two sums has about this rounding error
    if of_returns <= 1e-12 * sums.squared_returns / tokens:
        return None
    return 1.0 - of_errors / of_returns
