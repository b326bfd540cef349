"""The critic's model: a language model's layers with a value per token for an output layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from megadapo.algorithm.gae import value_losses
from megadapo.models.description import ModelDescription
from megadapo.models.rows import VALUE_HEAD
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.config import TrainerConfig
from megadapo.trainer.model.model import build_chunks
from megadapo.weights.disk.load import fill_shard, match_params
from megadapo.weights.disk.sources import TensorSource, check_tensors
from megadapo.weights.layout.layout import ModelLayout
from megadapo.weights.layout.shards import ShardPosition

(_HEAD,) = VALUE_HEAD.hf


class ValueHead(torch.nn.Module):
    """hidden [T, H] or, with sequence parallelism, [T / TP, H] to values [T] fp32, whole on every
    tensor-parallel rank."""

    def __init__(self, config: TransformerConfig, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device)
        )
        # each tensor-parallel rank then has its own tokens' part of the gradient, to be added up
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        # a value in bf16 would have three digits
        values = functional.linear(hidden.float(), self.weight.float()).squeeze(-1)
        if self.sequence_parallel:
            # every rank makes the whole loss of them, so its own part of the gradient is all of it
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values


def build_value_chunks(
    config: TransformerConfig, model: ModelDescription, trainer: TrainerConfig
) -> list[GPTModel]:
    """This rank's part of the critic, with weights not yet set: its chunks in model order."""
    chunks = build_chunks(config, model, trainer)
    for chunk in chunks:
        if chunk.post_process:
            chunk.output_layer = ValueHead(config, chunk.output_layer.weight.device)
    return chunks


def set_value_weights(
    source: TensorSource,
    where: Path,
    params: Mapping[str, Tensor],
    layout: ModelLayout,
    position: ShardPosition,
) -> None:
    """Fill this rank's parameters in place; the value head is 0 where `source` has none.

    Args:
        source: tensors of a language model or of a critic.
        where: what an error calls it.
        layout: of the critic.

    Raises:
        WeightError: a tensor is missing, unknown or misshapen; it is named.
    """
    if _HEAD not in source.shapes:
        source = _WithValueHead(source, layout)
    check_tensors(source, layout, where)
    for shard, param in match_params(params, layout, position):
        fill_shard(param, shard, source)


class _WithValueHead:
    """A language model's tensors but for its output layer, and zeros for the value head."""

    def __init__(self, source: TensorSource, layout: ModelLayout) -> None:
        (head_shape,) = (layout.hf_shapes[name] for name in VALUE_HEAD.hf)
        kept = {name: shape for name, shape in source.shapes.items() if name != "lm_head.weight"}
        self.shapes: dict[str, tuple[int, ...]] = {**kept, _HEAD: head_shape}
        self.dtypes: Mapping[str, Any] = {**source.dtypes, _HEAD: torch.float32}
        self._source = source

    def read(self, name: str, axis: int, start: int, stop: int) -> Tensor:
        """Positions `start` to `stop` along `axis` of one tensor."""
        if name != _HEAD:
            return self._source.read(name, axis, start, stop)
        return torch.zeros(self.shapes[_HEAD]).narrow(axis, start, stop - start)


@dataclass(frozen=True, kw_only=True)
class ValueTargets:
    """What the critic learns from one micro-batch: [R] of its predicted tokens, fp32."""

    values_old: Tensor
    returns: Tensor


@dataclass(frozen=True, kw_only=True)
class ValueTask:
    """What the critic does with one micro-batch."""

    micro_batch: MicroBatch
    targets: ValueTargets | None
    """None asks for values instead of the loss."""


@dataclass(frozen=True, kw_only=True)
class ValueOutput:
    """The loss of one micro-batch."""

    loss: Tensor
    """sum_t loss_weights[t] * l_t, fp32, 0-d; the weights are the policy's."""
    clipped: Tensor
    """Tokens whose clipped error is the larger, 0-d."""


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """The critic's `output_processor`."""

    value_clip: float | None

    def __call__(
        self, *, hidden_states: Tensor, output_layer: ValueHead, context: ValueTask, **unused: Any
    ) -> ValueOutput | Tensor:
        """The loss, or [T] values where there are no targets; entry t as in `MicroBatch`."""
        values: Tensor = output_layer(hidden_states.squeeze(1))
        targets, rows = context.targets, context.micro_batch.rows
        if targets is None:
            return values
        losses, is_clipped = value_losses(
            values[rows], targets.values_old, targets.returns, value_clip=self.value_clip
        )
        loss = (context.micro_batch.loss_weights[rows] * losses).sum()
        return ValueOutput(loss=loss, clipped=is_clipped.sum())
