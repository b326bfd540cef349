"""The model's last step: from hidden states to the loss or log-probs, without the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from megadapo.algorithm.importance import ImportanceConfig, sequence_log_ratios
from megadapo.algorithm.objective import COVARIANCE_GATES, PolicyObjective
from megadapo.kernels.policy_head import (
    HeadOptions,
    PolicyHeadOutput,
    policy_head_loss,
    token_logprobs,
)
from megadapo.trainer.batch.micro_batch import MicroBatch, old_policy
from megadapo.trainer.model.parallel import add_up_over_context


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
    importance: ImportanceConfig = ImportanceConfig()
    """Weights of the tokens of a micro-batch that comes without its old policy."""
    wait_for_weight: Callable[[Tensor], None]
    """Function to call before the output weight is read, as the output layer is not called."""
    tp_invariant: bool = True
    """Whether every tensor-parallel size gives the same bits, see `HeadOptions.tp_invariant`."""

    def __call__(
        self,
        *,
        hidden_states: Tensor,  # [T, 1, H], or [T / TP, 1, H] with sequence parallelism
        output_layer: OutputLayer,
        output_weight: Tensor | None,
        context: MicroBatch,
        **model_inputs: Any,
    ) -> PolicyHeadOutput:
        """Return the loss with its statistics.

        A micro-batch without old log-probs gets those of a pass over the same hidden states.
        """
        hidden, weight, common = self._operands(hidden_states, output_layer, output_weight, context)
        has_old_policy = context.logprobs_old is not None
        if self.objective.ratio == "sequence" or not has_old_policy:
            # rows and blocks are those of the loss, so the log-probs are too
            with torch.no_grad():
                logprobs = token_logprobs(hidden, weight, context.targets, **common).logprobs
            if not has_old_policy:
                context = old_policy(context, logprobs, self.importance)
        logprobs_old = context.logprobs_old
        assert logprobs_old is not None, "set above"
        if self.objective.ratio == "sequence":
            logprobs_old = sequence_ratios(context, logprobs)
        advantages, penalties = context.advantages, None
        if self.objective.gate in COVARIANCE_GATES:
            assert context.is_chosen is not None, "chosen before the update"
            if self.objective.gate == "clip_cov":
                # their KL divergence and entropy bonus stay
                advantages = advantages.masked_fill(context.is_chosen != 0, 0.0)
            else:
                penalties = self.objective.cov_coef * context.is_chosen
        # computed advantages may be NaN: the loss is then NaN too, which is handled later
        common["check_inputs"] = not context.has_computed_advantages
        return policy_head_loss(
            hidden,
            weight,
            context.targets,
            logprobs_old=logprobs_old,
            advantages=advantages,
            loss_weights=context.loss_weights,
            logprobs_ref=context.logprobs_ref,
            importance_weights=context.importance_weights,
            penalties=penalties,
            objective=self.objective,
            **common,
        )

    def logprobs(self, **model_inputs: Any) -> Tensor:
        """Return [T] log-probs; an `output_processor` like the head itself."""
        return self.logprobs_and_distances(**model_inputs)[0]

    def logprobs_and_distances(
        self,
        *,
        hidden_states: Tensor,
        output_layer: OutputLayer,
        output_weight: Tensor | None,
        context: MicroBatch,
        **model_inputs: Any,
    ) -> Tensor:
        """Return [2, T]: log-probs and `TokenLogprobs.distance`; an `output_processor` too."""
        hidden, weight, common = self._operands(hidden_states, output_layer, output_weight, context)
        found = token_logprobs(hidden, weight, context.targets, **common)
        return torch.stack([found.logprobs, found.distance])

    def _operands(
        self,
        hidden_states: Tensor,
        output_layer: OutputLayer,
        output_weight: Tensor | None,
        micro_batch: MicroBatch,
    ) -> tuple[Tensor, Tensor, HeadOptions]:
        """Return hidden states, output weight and options: the same in both passes."""
        weight = output_layer.weight if output_weight is None else output_weight
        self.wait_for_weight(weight)
        options: HeadOptions = {
            "temperature": self.temperature,
            "process_group": mpu.get_tensor_model_parallel_group(),
            "vocab_size": self.vocab_size,
            # the same rows in both passes: equal shapes give equal bits
            "rows": micro_batch.rows,
            "sequence_parallel": output_layer.sequence_parallel,
            "tp_invariant": self.tp_invariant,
            # the schedule differentiates every loss, with gradient 1, after it has zeroed main_grad
            "accumulate_in_forward": weight.is_cuda,
        }
        return hidden_states.squeeze(1), weight, options


def sequence_ratios(micro_batch: MicroBatch, logprobs: Tensor) -> Tensor:
    """Return [T] log of the ratio of each token's sequence.

    A sequence is never split over micro-batches, and context-parallel ranks add up their parts.
    Tokens without a loss do not count in the ratio and have their old log-prob, which is not finite
    where the head drops and counts them.
    """
    old = micro_batch.logprobs_old
    assert old is not None, "computed before the first update"
    known = micro_batch.loss_weights != 0
    for values in (old, micro_batch.logprobs_ref, micro_batch.importance_weights):
        known = known if values is None else known & values.isfinite()
    enters = known[micro_batch.rows]
    rows = micro_batch.rows[enters]
    ratios = old.clone()
    ratios[rows] = sequence_log_ratios(
        logprobs[rows],
        old[rows],
        torch.from_numpy(micro_batch.sequences).to(rows.device)[enters],
        num_sequences=len(micro_batch.members),
        add_up=add_up_over_context,
    )
    return ratios
