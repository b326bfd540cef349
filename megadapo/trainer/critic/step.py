"""One rollout step of the critic: values of its tokens, their advantages, and its updates.

The critic reads the policy's micro-batches, which hold whole sequences. So advantages are computed
beside the values, and no value leaves the last pipeline stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megadapo.algorithm.gae import generalized_advantages, terminal_rewards
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.batch.mini_batch import MiniBatch
from megadapo.trainer.critic.critic import Critic, CriticSums, summarize_critic
from megadapo.trainer.critic.value_model import ValueTargets
from megadapo.trainer.model.parallel import add_up_over_context, has_results
from megadapo.trainer.types import Metrics
from megadapo.trainer.update.optimizer import gather_weights_now, step_if_finite


class CriticStep:
    """One rollout step of the critic; every method is collective over the trainer's ranks."""

    def __init__(
        self,
        critic: Critic,
        split: Sequence[MiniBatch],
        step: int,
        *,
        kl_coef: float,
    ) -> None:
        """Compute values of all of the step's tokens, before any update.

        Args:
            split: this rank's part of each mini-batch, with the KL divergence that rewards include.
        """
        self._critic, self._kl_coef = critic, kl_coef
        self._lr = critic.optimizer_config.lr_at(step)
        self._reduced: list[CriticSums] = []
        self._grad_norms: list[float] = []
        self.targets: list[list[ValueTargets]] = []
        """[update][micro-batch] -> targets; empty lists except on the last pipeline stage."""
        raw: list[list[np.ndarray]] = []
        for mini_batch in split:
            # empty except on the last stage
            pairs = list(zip(mini_batch, critic.values(mini_batch), strict=False))
            raw.append([self._raw_advantages(*pair) for pair in pairs])
            self.targets.append(
                [
                    _targets(values[micro_batch.rows], advantages)
                    for (micro_batch, values), advantages in zip(pairs, raw[-1], strict=True)
                ]
            )
        self.split = self._with_whitened(split, raw)
        """The mini-batches with advantages that are whitened over the step's tokens."""

    def update(self, number: int) -> None:
        """Train on the micro-batches of the step's update `number`, counted from 0."""
        critic = self._critic
        sums = critic.gradients(self.split[number], self.targets[number])
        sums = sums.reduced(contributes=has_results(), device=critic.device)
        self._reduced.append(sums)
        grad_norm = step_if_finite(critic.optimizer, loss=sums.loss, lr=self._lr)
        if grad_norm is not None:
            self._grad_norms.append(grad_norm)

    def result(self) -> Metrics:
        """Complete the critic's weights; return the step's metrics, the same on every rank."""
        gather_weights_now(self._critic.chunks)
        return summarize_critic(self._reduced, grad_norms=self._grad_norms, lr=self._lr)

    def _raw_advantages(self, micro_batch: MicroBatch, values: Tensor) -> np.ndarray:
        """Return [R] float64 of the predicted tokens; each token's reward includes its own KL."""
        rows, sequences = micro_batch.rows, micro_batch.whole_sequences
        known = [micro_batch.advantages[rows], values[rows]]
        if self._kl_coef != 0.0:
            assert micro_batch.kl is not None, "ReferencePolicy.add_logprobs sets it"
            known.append(micro_batch.kl)
        scores, of_states, *kl = _of_whole_sequences(micro_batch, known)
        rewards = terminal_rewards(scores, sequences)
        for divergence in kl:
            rewards -= self._kl_coef * divergence
        advantages = generalized_advantages(
            rewards,
            of_states,
            sequences,
            discount=self._critic.settings.algorithm.discount,
            gae_lambda=self._critic.settings.algorithm.gae_lambda,
        )
        own: np.ndarray = advantages[micro_batch.own]
        return own

    def _with_whitened(
        self, split: Sequence[MiniBatch], raw: list[list[np.ndarray]]
    ) -> list[MiniBatch]:
        flat = [values for parts in raw for values in parts]
        whitened = iter(
            whitened_over_ranks(flat, contributes=has_results(), device=self._critic.device)
        )
        return [
            mini_batch.with_policy(
                [
                    micro_batch.with_advantages(next(whitened))
                    for micro_batch, _ in zip(mini_batch, parts, strict=False)
                ]
            )
            for mini_batch, parts in zip(split, raw, strict=True)
        ]


def whitened_over_ranks(
    pieces: Sequence[np.ndarray], *, contributes: bool, device: torch.device
) -> list[np.ndarray]:
    """Subtract the mean over all ranks and divide by the unbiased standard deviation; collective.

    Equal numbers become 0. Ranks that do not contribute use the others' mean and deviation.

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
    shape = (len(known), len(micro_batch.whole_sequences))
    values = micro_batch.rows.new_zeros(shape, dtype=torch.float64)
    own = torch.from_numpy(micro_batch.own).to(values.device)
    values[:, own] = torch.stack([values_here.double() for values_here in known])
    add_up_over_context(values)
    found: np.ndarray = values.cpu().numpy()
    return found


def _targets(values_old: Tensor, advantages: np.ndarray) -> ValueTargets:
    returns = values_old.double() + torch.from_numpy(advantages).to(values_old.device)
    return ValueTargets(values_old=values_old, returns=returns.float())
