"""The critic's model: a language model whose output layer gives one value per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from megadapo.algorithm.gae import value_losses
from megadapo.models.rows import VALUE_HEAD
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.weights.disk.sources import TensorSource
from megadapo.weights.layout.layout import ModelLayout

(_HEAD,) = VALUE_HEAD.hf


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
class ValueTargets:
    """Targets of one micro-batch: [R] fp32 of its predicted tokens."""

    values_old: Tensor
    returns: Tensor


@dataclass(frozen=True, kw_only=True)
class ValueOutput:
    """Loss of one micro-batch."""

    loss: Tensor
    """sum_t loss_weights[t] * l_t, fp32, 0-d; the weights are the policy's."""
    clipped: Tensor
    """Number of tokens whose clipped error is the larger one, 0-d."""


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """The critic's `output_processor`."""

    value_clip: float | None

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: ValueHead,
        context: MicroBatch,
        targets: ValueTargets,
        **unused: Any,
    ) -> ValueOutput:
        """Return the loss."""
        values = self.values(
            hidden_states=hidden_states, output_layer=output_layer, context=context
        )
        losses, is_clipped = value_losses(
            values, targets.values_old, targets.returns, value_clip=self.value_clip
        )
        loss = (context.loss_weights[context.rows] * losses).sum()
        return ValueOutput(loss=loss, clipped=is_clipped.sum())

    @staticmethod
    def values(
        *, hidden_states: Tensor, output_layer: ValueHead, context: MicroBatch, **unused: Any
    ) -> Tensor:
        """Return values [R] of the predicted tokens; an `output_processor` like the loss."""
        values: Tensor = output_layer(hidden_states.squeeze(1))
        return values[context.rows]
