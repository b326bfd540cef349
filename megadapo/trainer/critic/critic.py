"""The critic of one rank: its part of the model, its optimizer, and what can be asked of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
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
from megadapo.trainer.model.model import transformer_config
from megadapo.trainer.model.model_layout import validate_critic, validate_model_layout
from megadapo.trainer.model.parallel import parameters_by_global_name, shard_position
from megadapo.trainer.types import CRITIC_FOLDER, CriticResult, TrainerSettings
from megadapo.trainer.update.optimizer import build_optimizer, wrap_for_gradients
from megadapo.trainer.update.step import finalize_sums, run_schedule
from megadapo.weights.disk.sources import open_source
from megadapo.weights.layout.layout import ModelLayout


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
        """Count tokens with values [R] before the step's first update and returns [R]."""
        values, returns = values.double(), returns.double()
        errors = returns - values
        self.num_tokens += len(values)
        self.values += values.sum().item()
        self.returns += returns.sum().item()
        self.squared_returns += returns.square().sum().item()
        self.errors += errors.sum().item()
        self.squared_errors += errors.square().sum().item()

    def reduced(self, *, contributes: bool, device: torch.device) -> CriticSums:
        """The sums over the ranks that contribute; collective, the same on all."""
        own = astuple(self if contributes else CriticSums())
        total = torch.tensor(own, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(total)
        return CriticSums(
            **dict(zip((field.name for field in fields(self)), total.tolist(), strict=True))
        )


def summarize_critic(
    mini_batches: Sequence[CriticSums], *, grad_norms: Sequence[float], lr: float
) -> CriticResult:
    """The critic's numbers of a step from its mini-batches' reduced sums.

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


def whitened_over_ranks(
    pieces: Sequence[np.ndarray], *, contributes: bool, device: torch.device
) -> list[np.ndarray]:
    """Numbers less their mean over all ranks, over their unbiased standard deviation; collective.

    Zeros where all are equal. Ranks that do not contribute get their own pieces by the others'
    mean and deviation.

    Args:
        pieces: of this rank, [n] float64 each.
    """
    own = np.concatenate([np.empty(0), *(pieces if contributes else ())])
    count, total = _sums([len(own), own.sum()], device)
    ends = torch.tensor(
        [own.max(initial=-math.inf), -own.min(initial=math.inf)], dtype=torch.float64, device=device
    )
    torch.distributed.all_reduce(ends, op=torch.distributed.ReduceOp.MAX)
    largest, smallest = ends[0].item(), -ends[1].item()
    mean = total / max(1.0, count)
    (squares,) = _sums([np.square(own - mean).sum()], device)
    # of a NaN the ends may tell nothing
    if count < 2 or (largest == smallest and math.isfinite(total)):
        return [np.zeros_like(piece) for piece in pieces]
    deviation = math.sqrt(squares / (count - 1))
    return [(piece - mean) / deviation for piece in pieces]


def _sums(values: Sequence[float], device: torch.device) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total)
    sums: list[float] = total.tolist()
    return sums


def _explained_variance(sums: CriticSums) -> float | None:
    """1 - Var(returns - values) / Var(returns); None where all returns are the same."""
    tokens = sums.num_tokens
    of_returns = sums.squared_returns / tokens - (sums.returns / tokens) ** 2
    of_errors = sums.squared_errors / tokens - (sums.errors / tokens) ** 2
    # the difference of two sums has that much rounding
    if of_returns <= 1e-12 * sums.squared_returns / tokens:
        return None
    return 1.0 - of_errors / of_returns


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
