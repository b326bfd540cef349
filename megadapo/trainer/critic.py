"""The critic of one rank: its part of the model, its optimizer, and one rollout step of it.

The critic's model is a language model whose output layer gives one value per token. In a step it
reads the policy's micro-batches. These hold whole sequences, so advantages are computed beside the
values, and no value leaves the last pipeline stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional
from torch.profiler import record_function

from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.gae import generalized_advantages, token_rewards, value_losses
from megadapo.errors import CheckpointError
from megadapo.models.description import ModelDescription, describe_critic, describe_stored
from megadapo.models.folder import read_hf_config, resolve_model_folder
from megadapo.models.rows import VALUE_HEAD
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.batch.mini_batch import MiniBatch
from megadapo.trainer.checkpoint.checkpoint import load_checkpoint
from megadapo.trainer.model.model_layout import validate_critic
from megadapo.trainer.model.parallel import add_up_over_context, has_results
from megadapo.trainer.trained_model import TrainedModel
from megadapo.trainer.types import CRITIC_FOLDER, Metrics, TrainerSettings
from megadapo.trainer.update.metrics import Sums, mean_of, summed
from megadapo.trainer.update.optimizer import gather_weights_now, step_if_finite
from megadapo.trainer.update.step import run_schedule, without_experts
from megadapo.weights.disk.sources import TensorSource, open_weights
from megadapo.weights.layout.layout import ModelLayout

(_HEAD,) = VALUE_HEAD.hf
CRITIC_SUMS = (*summed(critic=True), "squared_returns", "errors", "squared_errors")
"""Sums over the trained tokens of one mini-batch; the last ones are of `explained_variance`."""


class ValueHead(torch.nn.Module):
    """A linear layer from hidden [T, H] to values [T] fp32, whole on every tensor-parallel rank.

    With sequence parallelism, hidden is [T / TP, H].
    """

    def __init__(self, config: TransformerConfig, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device)
        )
        # marks a gradient that is summed over tensor-parallel ranks, each of which has some tokens
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        # bf16 has only three digits
        values = functional.linear(hidden.float(), self.weight.float()).squeeze(-1)
        if self.sequence_parallel:
            # every rank computes the whole loss, so its own part of the gradient is complete
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values


class WithValueHead:
    """A language model's tensors with zeros for the value head, without its output layer."""

    def __init__(self, source: TensorSource, layout: ModelLayout) -> None:
        kept = {name: shape for name, shape in source.shapes.items() if name != "lm_head.weight"}
        self.shapes: dict[str, tuple[int, ...]] = {**kept, _HEAD: layout.hf_shapes[_HEAD]}
        self.dtypes: Mapping[str, Any] = {**source.dtypes, _HEAD: torch.float32}
        self._source = source

    def read(self, name: str, axis: int, start: int, stop: int) -> Tensor:
        """Return positions `start` to `stop` along `axis` of one tensor."""
        if name != _HEAD:
            return self._source.read(name, axis, start, stop)
        return torch.zeros(self.shapes[_HEAD]).narrow(axis, start, stop - start)


@dataclass(frozen=True, kw_only=True)
class ValueOutput:
    """Loss of one micro-batch."""

    loss: Tensor
    """sum_t loss_weights[t] * l_t, fp32, 0-d; the weights are the policy's."""
    clipped: Tensor
    """Number of tokens whose clipped error is the larger one, 0-d; 0 for a loss without a clip."""


def predicted_values(
    *, hidden_states: Tensor, output_layer: ValueHead, context: MicroBatch, **unused: Any
) -> Tensor:
    """Return values [R] of the predicted tokens; an `output_processor`."""
    values: Tensor = output_layer(hidden_states.squeeze(1))
    return values[context.rows]


def value_loss(*, context: MicroBatch, value_clip: float | None, **passed: Any) -> ValueOutput:
    """Return the critic's loss; an `output_processor`."""
    values = predicted_values(context=context, **passed)
    values_old, returns = context.values_old, context.returns
    assert values_old is not None and returns is not None, "add_token_advantages sets them"
    losses, is_clipped = value_losses(values, values_old, returns, value_clip=value_clip)
    loss = (context.loss_weights[context.rows] * losses).sum()
    return ValueOutput(loss=loss, clipped=is_clipped.sum())


class Critic(TrainedModel):
    """Model and optimizer of the critic; every method is collective over the trainer's ranks."""

    def __init__(
        self, settings: TrainerSettings, *, policy: ModelDescription, device: torch.device
    ) -> None:
        """`policy`: the model whose micro-batches the critic reads."""
        assert settings.critic is not None, "a critic needs its section"
        self.device = device
        self.is_random = settings.model.init == "random" and settings.critic.path is None
        """Whether the critic starts with random weights, as the policy does."""
        folder = resolve_model_folder(
            settings.critic.path or settings.model.path,
            with_weights=not self.is_random,
            key="critic.path",
        )
        model = describe_critic(read_hf_config(folder))
        validate_critic(model, policy, settings.trainer)
        self.optimizer_config = settings.critic.optimizer.completed_by(settings.trainer.optimizer)
        super().__init__(
            settings,
            model,
            self.optimizer_config,
            folder,
            needs_weights=settings.reads_weights,
        )
        self.head = partial(value_loss, value_clip=settings.critic.value_clip)

    def build_chunks(self) -> list[GPTModel]:
        """Return this rank's chunks with a value head in place of the output layer."""
        chunks = super().build_chunks()
        for chunk in chunks:
            if chunk.post_process:
                chunk.output_layer = ValueHead(self.config, chunk.output_layer.weight.device)
        return chunks

    def first_weights(self) -> TensorSource:
        """Return the tensors of a critic; its value head is 0 if the folder has none."""
        if self.is_random:
            return WithValueHead(super().first_weights(), self.layout)
        stored = describe_stored(read_hf_config(self.model_folder))
        source = open_weights(self.model_folder, ModelLayout(stored.family, stored.shape))
        is_critic = stored.family.head == VALUE_HEAD
        return source if is_critic else WithValueHead(source, self.layout)

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return values [R] of each micro-batch's predicted tokens, computed without a gradient.

        The list is empty except on the last pipeline stage.
        """
        # the engines' experts are the policy's
        work = [(one, predicted_values) for one in without_experts(micro_batches)]
        with torch.no_grad(), record_function("megadapo::values"):
            return run_schedule(self.chunks, work, forward_only=True)

    def add_advantages(self, split: Sequence[MiniBatch], *, kl_coef: float) -> list[MiniBatch]:
        """Return a step's mini-batches with values, returns and advantages, before any update.

        `split`: this rank's part of each mini-batch, with the KL divergence that rewards include.
        """
        values = [self.values(mini_batch) for mini_batch in split]
        return add_token_advantages(
            split, values, self.settings.algorithm, kl_coef=kl_coef, device=self.device
        )

    def fit(self, split: Sequence[MiniBatch], order: Sequence[int], step: int) -> Metrics:
        """Apply the updates of a step to the mini-batches of `add_advantages`; return its metrics.

        `order`: the mini-batch of each update.
        """
        lr = self.optimizer_config.lr_at(step)
        measured: list[Sums] = []
        grad_norms: list[float] = []
        for number in order:
            sums = self.gradients(split[number])
            measured.append(sums)
            norm = step_if_finite(self.optimizer, loss=sums["critic/loss"], lr=lr)
            grad_norms += [] if norm is None else [norm]
        # saves read the weights after this
        gather_weights_now(self.chunks)
        return summarize_critic(measured, grad_norms=grad_norms, lr=lr)

    @record_function("megadapo::value_gradients")
    def gradients(self, micro_batches: Sequence[MicroBatch]) -> Sums:
        """Leave the mini-batch's summed gradients in the buffers; return the sums of all ranks."""
        work = [(one, self.head) for one in without_experts(micro_batches)]
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        outputs = run_schedule(self.chunks, work, forward_only=False)
        sums = Sums(CRITIC_SUMS)
        for (micro_batch, _), output in zip(work, outputs, strict=False):
            assert micro_batch.values_old is not None and micro_batch.returns is not None
            add_values(sums, micro_batch.values_old, micro_batch.returns)
            sums["critic/loss"] += output.loss.item()
            sums["critic/clip_fraction"] += output.clipped.item()
        return sums.reduced(self.device)

    def load(self, folder: Path) -> None:
        """Read the critic from a trainer's checkpoint of any split.

        Raise CheckpointError if it has no critic, is damaged, or of another model.
        """
        if not (folder / CRITIC_FOLDER).is_dir():
            raise CheckpointError(
                f"{folder} was written without a critic, which "
                'algorithm.advantage = "gae" needs: continue with the advantage it was trained '
                "with, or start a run from its export"
            )
        load_checkpoint(self.runs, self.chunks, self.optimizer, folder / CRITIC_FOLDER)


def summarize_critic(
    mini_batches: Sequence[Sums], *, grad_norms: Sequence[float], lr: float
) -> Metrics:
    """Return the critic's metrics of a step from its mini-batches' reduced sums."""
    total = Sums.merged(mini_batches)
    if not total["tokens"]:
        return {"critic/lr": lr}
    return {
        **total.metrics(),
        "critic/explained_variance": explained_variance(total),
        "critic/grad_norm": mean_of(sum(grad_norms), len(grad_norms)),
        "critic/lr": lr,
        "critic/skipped_updates": len(mini_batches) - len(grad_norms),
    }


def add_values(sums: Sums, values: Tensor, returns: Tensor) -> None:
    """Add tokens, given their values [R] and returns [R] before the step's first update."""
    values, returns = values.double(), returns.double()
    errors = returns - values
    sums["tokens"] += len(values)
    sums["critic/value_mean"] += values.sum().item()
    sums["critic/return_mean"] += returns.sum().item()
    sums["squared_returns"] += returns.square().sum().item()
    sums["errors"] += errors.sum().item()
    sums["squared_errors"] += errors.square().sum().item()


def explained_variance(sums: Sums) -> float | None:
    """Return 1 - Var(returns - values) / Var(returns): 1 for exact values, 0 for a constant.

    None if all returns are equal.
    """
    tokens, squared_returns = sums["tokens"], sums["squared_returns"]
    of_returns = squared_returns / tokens - (sums["critic/return_mean"] / tokens) ** 2
    of_errors = sums["squared_errors"] / tokens - (sums["errors"] / tokens) ** 2
    # the difference of two sums has about this rounding error
    if of_returns <= 1e-12 * squared_returns / tokens:
        return None
    return 1.0 - of_errors / of_returns


def add_token_advantages(
    split: Sequence[MiniBatch],
    values: Sequence[Sequence[Tensor]],
    algorithm: AlgorithmConfig,
    *,
    kl_coef: float,
    device: torch.device,
) -> list[MiniBatch]:
    """Return the mini-batches with advantages that are whitened over the step's tokens; collective.

    They also get the critic's targets.

    Args:
        split: this rank's part of each mini-batch, with the KL divergence that rewards include.
        values: [mini-batch][micro-batch] -> [R] of the predicted tokens; empty lists except on the
            last pipeline stage.
    """
    advantages = [
        [
            _token_advantages(micro_batch, own, algorithm, kl_coef=kl_coef)
            for micro_batch, own in zip(mini_batch, parts, strict=False)
        ]
        for mini_batch, parts in zip(split, values, strict=True)
    ]
    flat = [own for parts in advantages for own in parts]
    whitened = iter(_whitened_over_ranks(flat, device))
    found = []
    for mini_batch, parts, raw in zip(split, values, advantages, strict=True):
        computed = []
        for micro_batch, values_old, own in zip(mini_batch, parts, raw, strict=False):
            returns = values_old.double() + torch.from_numpy(own).to(values_old.device)
            with_targets = replace(micro_batch, values_old=values_old, returns=returns.float())
            computed.append(with_targets.with_advantages(next(whitened)))
        found.append(mini_batch.with_policy(computed))
    return found


def values_of_tokens(
    split: Sequence[MiniBatch], values: np.ndarray, device: torch.device
) -> list[list[Tensor]]:
    """Return known values [T] of a batch as `add_token_advantages` takes them."""
    is_last = mpu.is_pipeline_last_stage()
    return [
        [
            torch.from_numpy(values[micro_batch.batch_index]).to(device)
            for micro_batch in mini_batch
            if is_last
        ]
        for mini_batch in split
    ]


def _token_advantages(
    micro_batch: MicroBatch, values: Tensor, algorithm: AlgorithmConfig, *, kl_coef: float
) -> np.ndarray:
    """Return [R] float64 of the predicted tokens; each token's reward includes its own KL."""
    known = [micro_batch.advantages[micro_batch.rows], values]
    if kl_coef != 0.0:
        assert micro_batch.kl is not None, "ReferencePolicy.add_logprobs sets it"
        known.append(micro_batch.kl)
    to_go, of_states, *kl = _of_whole_sequences(micro_batch, known)
    rewards = token_rewards(to_go, micro_batch.sequences_all_ranks)
    for divergence in kl:
        rewards -= kl_coef * divergence
    advantages = generalized_advantages(
        rewards,
        of_states,
        micro_batch.sequences_all_ranks,
        discount=algorithm.discount,
        gae_lambda=algorithm.gae_lambda,
    )
    own: np.ndarray = advantages[micro_batch.own_of_all_ranks]
    return own


def _whitened_over_ranks(pieces: Sequence[np.ndarray], device: torch.device) -> list[np.ndarray]:
    """Subtract the mean over all ranks and divide by the unbiased standard deviation; collective.

    Equal numbers become 0. Ranks without results use the others' mean and deviation. `pieces`: of
    this rank, [n] float64 each.
    """
    own = np.concatenate([np.empty(0), *(pieces if has_results() else ())])
    count, total = _sums([len(own), own.sum()], device)
    ends = torch.tensor(
        [own.max(initial=-math.inf), -own.min(initial=math.inf)], dtype=torch.float64, device=device
    )
    torch.distributed.all_reduce(ends, op=torch.distributed.ReduceOp.MAX)
    largest, smallest = ends[0].item(), -ends[1].item()
    mean = total / max(1.0, count)
    (squares,) = _sums([np.square(own - mean).sum()], device)
    # NaN may be lost in the maxima, but not in the sum
    if count < 2 or (largest == smallest and math.isfinite(total)):
        return [np.zeros_like(piece) for piece in pieces]
    deviation = math.sqrt(squares / (count - 1))
    return [(piece - mean) / deviation for piece in pieces]


def _sums(values: Sequence[float], device: torch.device) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total)
    sums: list[float] = total.tolist()
    return sums


def _of_whole_sequences(micro_batch: MicroBatch, known: Sequence[Tensor]) -> np.ndarray:
    """Return each [R] as [N] float64, with the values of the other context-parallel ranks."""
    shape = (len(known), len(micro_batch.sequences_all_ranks))
    values = micro_batch.rows.new_zeros(shape, dtype=torch.float64)
    own = torch.from_numpy(micro_batch.own_of_all_ranks).to(values.device)
    values[:, own] = torch.stack([values_here.double() for values_here in known])
    add_up_over_context(values)
    found: np.ndarray = values.cpu().numpy()
    return found
