"""One rollout step of the critic: values of its tokens, the advantages they give, and its updates.

It goes through the policy's micro-batches, which hold whole sequences, so that advantages are made
where the values are: no value leaves the last pipeline stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from megadapo.algorithm.gae import generalized_advantages, terminal_rewards
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.batch.off_policy import OldPolicy
from megadapo.trainer.critic.critic import Critic, CriticSums, summarize_critic, whitened_over_ranks
from megadapo.trainer.critic.value_model import ValueTargets
from megadapo.trainer.model.parallel import add_up_over_context
from megadapo.trainer.types import CriticResult
from megadapo.trainer.update.optimizer import gather_weights_now, step_if_finite


class CriticStep:
    """One rollout step of the critic; every method is collective over the trainer's ranks."""

    def __init__(
        self,
        critic: Critic,
        cut: Sequence[Sequence[MicroBatch]],
        old: Sequence[Sequence[OldPolicy]],
        step: int,
        *,
        kl_coef: float,
    ) -> None:
        """Take values of all of the step's tokens, before any update.

        Args:
            cut: this rank's micro-batches of each update.
            old: what each of them is held against, with the KL divergence that rewards pay for;
                empty except on the last pipeline stage.
            step: rollout step, which decides the learning rate; the first is 1.
            kl_coef: weight of the KL divergence in the rewards.
        """
        self._critic, self._cut, self._kl_coef = critic, cut, kl_coef
        self._lr = critic.section.optimizer.lr_at(step)
        self._reduced: list[CriticSums] = []
        self._grad_norms: list[float] = []
        self.targets: list[list[ValueTargets]] = []
        """[update][micro-batch] -> what the critic learns; empty lists except on the last pipeline
        stage."""
        raw: list[list[np.ndarray]] = []
        for micro_batches, policies in zip(cut, old, strict=True):
            # none on other stages than the last
            values = critic.values(micro_batches)
            triples = list(zip(micro_batches, policies, values, strict=False))
            raw.append([self._raw_advantages(*triple) for triple in triples])
            self.targets.append(
                [
                    _targets(values[micro_batch.rows], advantages)
                    for (micro_batch, _, values), advantages in zip(triples, raw[-1], strict=True)
                ]
            )
        self.old = [
            [replace(policy, advantages=own) for policy, own in zip(*pair, strict=True)]
            for pair in zip(old, self._whitened(raw), strict=True)
        ]
        """[update][micro-batch] -> `old` with [T] advantages of each token, whitened over the
        step's tokens."""

    def update(self, number: int) -> None:
        """Train on the micro-batches of the step's update `number`, counted from 0."""
        critic = self._critic
        sums = critic.gradients(self._cut[number], self.targets[number])
        sums = sums.reduced(contributes=_has_results(), device=critic.device)
        outcome = step_if_finite(critic.optimizer, loss=sums.loss, lr=self._lr)
        self._reduced.append(sums)
        if outcome.applied:
            self._grad_norms.append(outcome.grad_norm)

    def result(self) -> CriticResult:
        """The step's numbers, the same on every rank; weights are whole from here on."""
        gather_weights_now(self._critic.chunks)
        return summarize_critic(self._reduced, grad_norms=self._grad_norms, lr=self._lr)

    def _raw_advantages(
        self, micro_batch: MicroBatch, policy: OldPolicy, values: Tensor
    ) -> np.ndarray:
        """[R] float64 of a micro-batch's predicted tokens, each of which pays for its own KL."""
        rows, sequences = micro_batch.rows, micro_batch.whole.sequences
        known = [micro_batch.advantages[rows], values[rows]]
        if self._kl_coef != 0.0:
            assert policy.kl is not None, "the reference comes first"
            known.append(policy.kl)
        scores, of_states, *kl = _of_whole_sequences(micro_batch, known)
        rewards = terminal_rewards(scores, sequences)
        for divergence in kl:
            rewards -= self._kl_coef * divergence
        advantages = generalized_advantages(
            rewards,
            of_states,
            sequences,
            discount=self._critic.settings.discount,
            gae_lambda=self._critic.settings.gae_lambda,
        )
        own: np.ndarray = advantages[micro_batch.whole.own]
        return own

    def _whitened(self, raw: list[list[np.ndarray]]) -> list[list[Tensor]]:
        flat = [values for parts in raw for values in parts]
        whitened = iter(
            whitened_over_ranks(flat, contributes=_has_results(), device=self._critic.device)
        )
        return [
            [
                torch.zeros_like(micro_batch.advantages).index_copy_(
                    0, micro_batch.rows, _float32(next(whitened), micro_batch.rows)
                )
                for micro_batch, _ in zip(micro_batches, parts, strict=False)
            ]
            for micro_batches, parts in zip(self._cut, raw, strict=True)
        ]


def _of_whole_sequences(micro_batch: MicroBatch, known: Sequence[Tensor]) -> np.ndarray:
    """Each [R] as [N] float64, with what other context-parallel ranks know of the sequences."""
    whole = micro_batch.whole
    values = micro_batch.rows.new_zeros((len(known), len(whole.sequences)), dtype=torch.float64)
    own = torch.from_numpy(whole.own).to(values.device)
    values[:, own] = torch.stack([values_here.double() for values_here in known])
    add_up_over_context(values)
    found: np.ndarray = values.cpu().numpy()
    return found


def _targets(values_old: Tensor, advantages: np.ndarray) -> ValueTargets:
    returns = values_old.double() + torch.from_numpy(advantages).to(values_old.device)
    return ValueTargets(values_old=values_old, returns=returns.float())


def _float32(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values.astype(np.float32)).to(like.device)


def _has_results() -> bool:
    """Whether this rank's sums count: one tensor-parallel rank of each last stage."""
    return bool(mpu.is_pipeline_last_stage() and mpu.get_tensor_model_parallel_rank() == 0)
