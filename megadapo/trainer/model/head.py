"""The model's last step: from hidden states to the loss or log-probs, without the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from megadapo.algorithm.objective import PolicyObjective
from megadapo.algorithm.ratios import sequence_shifted
from megadapo.kernels.policy_head import (
    HeadOptions,
    PolicyHeadOutput,
    policy_head_loss,
    token_logprobs,
)
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.batch.off_policy import OldPolicy
from megadapo.trainer.model.parallel import add_up_over_context

LIKELIHOOD = PolicyObjective(ratio="none", gate="none")
"""Objective of a language model: with advantages of 1, a token's loss is minus its log-prob."""


@dataclass(frozen=True, kw_only=True)
class HeadTask:
    """Work of the head on one micro-batch."""

    micro_batch: MicroBatch
    old: OldPolicy | None
    """Old policy for the loss; None asks for log-probs instead."""
    is_pretraining: bool = False
    """Whether the loss is a language model's, at temperature 1."""
    replays: bool = True
    """Whether routers use the experts in the micro-batch, if there are any."""

    @property
    def experts(self) -> Tensor | None:
        """Experts [T, layers, K] for the routers to use; None lets them choose."""
        return self.micro_batch.experts if self.replays else None


class OutputLayer(Protocol):
    """The part of megatron-core's output layer that the head reads."""

    weight: Tensor
    sequence_parallel: bool


@dataclass(frozen=True, kw_only=True)
class PolicyHead:
    """The policy's `output_processor`; only rows that predict a token go through the kernel."""

    objective: PolicyObjective
    temperature: float
    vocab_size: int
    """Number of rows of the output weight that are tokens; the rest is padding."""
    wait_for_weight: Callable[[Tensor], None]
    """Function to call before the output weight is read, as the output layer is not called."""

    def __call__(
        self,
        *,
        hidden_states: Tensor,  # [T, 1, H], or [T / TP, 1, H] with sequence parallelism
        output_layer: OutputLayer,
        output_weight: Tensor | None,
        context: HeadTask,
        **model_inputs: Any,
    ) -> PolicyHeadOutput | Tensor:
        """Return the loss with its statistics, or [T] log-probs if the task has no old ones."""
        objective, temperature = self.objective, self.temperature
        if context.is_pretraining:
            objective, temperature = LIKELIHOOD, 1.0
        micro_batch = context.micro_batch
        hidden = hidden_states.squeeze(1)
        weight = output_layer.weight if output_weight is None else output_weight
        self.wait_for_weight(weight)
        common: HeadOptions = {
            "temperature": temperature,
            "process_group": mpu.get_tensor_model_parallel_group(),
            "vocab_size": self.vocab_size,
            # the same rows in both passes: equal shapes give equal bits
            "rows": micro_batch.rows,
            "sequence_parallel": output_layer.sequence_parallel,
        }
        if context.old is None:
            logprobs, _ = token_logprobs(hidden, weight, micro_batch.targets, **common)
            return logprobs
        logprobs_old = context.old.logprobs
        if objective.ratio == "sequence":
            # the same rows and blocks as below, so these are the loss's own log-probs
            with torch.no_grad():
                logprobs, _ = token_logprobs(hidden, weight, micro_batch.targets, **common)
            logprobs_old = sequence_old(micro_batch, context.old, logprobs)
        own = context.old.advantages
        # advantages that ranks compute may be NaN: the loss is then NaN too, which is handled later
        common["check_inputs"] = own is None
        return policy_head_loss(
            hidden,
            weight,
            micro_batch.targets,
            logprobs_old=logprobs_old,
            advantages=micro_batch.advantages if own is None else own,
            loss_weights=micro_batch.loss_weights,
            logprobs_ref=context.old.logprobs_ref,
            importance_weights=context.old.importance_weights,
            objective=objective,
            **common,
        )


def sequence_old(micro_batch: MicroBatch, old: OldPolicy, logprobs: Tensor) -> Tensor:
    """Return [T] old log-probs that give every token its sequence's ratio.

    A sequence is never split over micro-batches, and context-parallel ranks add up their parts.
    Tokens without a loss do not count in the ratio. They keep their old log-prob, so that the head
    drops and counts them.
    """
    known = micro_batch.loss_weights != 0
    for values in (old.logprobs, old.logprobs_ref, old.importance_weights):
        known = known if values is None else known & values.isfinite()
    enters = known[micro_batch.rows]
    rows = micro_batch.rows[enters]
    shifted = old.logprobs.clone()
    shifted[rows] = sequence_shifted(
        logprobs[rows],
        old.logprobs[rows],
        torch.from_numpy(micro_batch.sequences).to(rows.device)[enters],
        num_sequences=len(micro_batch.members),
        add_up=add_up_over_context,
    )
    return shifted
