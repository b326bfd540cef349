"""The model's last step: from hidden states to DAPO's loss or to log-probs, without the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.core import parallel_state as mpu
from torch import Tensor

from megadapo.algorithm.objective import PolicyObjective
from megadapo.kernels.policy_head import PolicyHeadOutput, policy_head_loss, token_logprobs
from megadapo.trainer.micro_batch import MicroBatch
from megadapo.trainer.off_policy import OldPolicy


@dataclass(frozen=True, kw_only=True)
class HeadTask:
    """What the head does with the hidden states of one micro-batch."""

    micro_batch: MicroBatch
    old: OldPolicy | None
    """What the update is held against; None asks for log-probs instead of the loss."""


class OutputLayer(Protocol):
    """What is used of megatron-core's output layer."""

    weight: Tensor
    sequence_parallel: bool


@dataclass(frozen=True, kw_only=True)
class PolicyHead:
    """The `output_processor`: rows that predict something go through the kernel, no others."""

    objective: PolicyObjective
    temperature: float
    vocab_size: int
    """Rows of the output weight that are tokens; the rest is padding."""
    wait_for_weight: Callable[[Tensor], None]
    """Called before the output weight is read, which does not go through the output layer."""

    def __call__(
        self,
        *,
        hidden_states: Tensor,  # [T, 1, H], or [T / TP, 1, H] with sequence parallelism
        output_layer: OutputLayer,
        output_weight: Tensor | None,
        context: HeadTask,
        **model_inputs: Any,
    ) -> PolicyHeadOutput | Tensor:
        """The loss with its statistics, or [T] log-probs where there are no old ones."""
        micro_batch = context.micro_batch
        hidden = hidden_states.squeeze(1)
        weight = output_layer.weight if output_weight is None else output_weight
        self.wait_for_weight(weight)
        common = {
            "temperature": self.temperature,
            "process_group": mpu.get_tensor_model_parallel_group(),
            "vocab_size": self.vocab_size,
            # the same rows in both passes: equal shapes give equal bits
            "rows": micro_batch.rows,
            "sequence_parallel": output_layer.sequence_parallel,
        }
        if context.old is None:
            logprobs, _ = token_logprobs(hidden, weight, micro_batch.targets, **common)
            return logprobs
        return policy_head_loss(
            hidden,
            weight,
            micro_batch.targets,
            logprobs_old=context.old.logprobs,
            advantages=micro_batch.advantages,
            loss_weights=micro_batch.loss_weights,
            importance_weights=context.old.importance_weights,
            objective=self.objective,
            **common,
        )
