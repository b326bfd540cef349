"""The critic's last step: from hidden states to values, or to the loss of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megadapo.algorithm.gae import value_losses
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.critic.value_model import ValueHead


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
