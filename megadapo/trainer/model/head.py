"""The model's last step: from hidden states to the loss or to log-probs, without the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from megadapo.algorithm.objective import PolicyObjective
from megadapo.algorithm.ratios import sequence_shifted
from megadapo.kernels.policy_head import PolicyHeadOutput, policy_head_loss, token_logprobs
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.batch.off_policy import OldPolicy
from megadapo.trainer.model.parallel import add_up_over_context

LIKELIHOOD = PolicyObjective(ratio="none", gate="none")
"""With advantages of 1 a token's loss is minus its log-prob."""


@dataclass(frozen=True, kw_only=True)
class HeadTask:
    """What the head does with the hidden states of one micro-batch."""

    micro_batch: MicroBatch
    old: OldPolicy | None
    """What the update is held against; None asks for log-probs instead of the loss."""
    is_text: bool = False
    """Whether its loss is that of a language model, whatever the objective and the temperature."""
    replays: bool = True
    """Whether routers take over the experts of the micro-batch, if it has them."""

    @property
    def experts(self) -> Tensor | None:
        """[T, layers, K] that routers are told."""
        return self.micro_batch.experts if self.replays else None


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
        if context.is_text:
            return replace(self, objective=LIKELIHOOD, temperature=1.0)(
                hidden_states=hidden_states,
                output_layer=output_layer,
                output_weight=output_weight,
                context=replace(context, is_text=False),
            )
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
        logprobs_old = context.old.logprobs
        if self.objective.ratio == "sequence":
            # the same rows and blocks as below, so these are the loss's own log-probs
            with torch.no_grad():
                logprobs, _ = token_logprobs(hidden, weight, micro_batch.targets, **common)
            logprobs_old = sequence_old(micro_batch, context.old, logprobs)
        own = context.old.advantages
        return policy_head_loss(
            hidden,
            weight,
            micro_batch.targets,
            logprobs_old=logprobs_old,
            advantages=micro_batch.advantages if own is None else own,
            loss_weights=micro_batch.loss_weights,
            logprobs_ref=context.old.logprobs_ref,
            importance_weights=context.old.importance_weights,
            objective=self.objective,
            # those that ranks make are NaN where the model's numbers are, and so is the loss then
            check_inputs=own is None,
            **common,
        )


def sequence_old(micro_batch: MicroBatch, old: OldPolicy, logprobs: Tensor) -> Tensor:
    """[T] old log-probs that give every token its sequence's ratio.

    A sequence is never cut over micro-batches, and its context-parallel ranks add up their parts.
    Tokens that the loss leaves out have no part in its ratio and keep their old log-prob, so that
    the head drops and counts them.
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
