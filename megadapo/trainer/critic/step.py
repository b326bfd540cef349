"""One rollout step of the critic: values of its tokens, their advantages, and its updates.

The critic reads the policy's micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megadapo.trainer.batch.mini_batch import MiniBatch
from megadapo.trainer.critic.advantages import with_token_advantages
from megadapo.trainer.critic.critic import Critic, CriticSums, summarize_critic
from megadapo.trainer.critic.value_model import ValueTargets
from megadapo.trainer.model.parallel import has_results
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
        self._critic = critic
        self._lr = critic.optimizer_config.lr_at(step)
        self._reduced: list[CriticSums] = []
        self._grad_norms: list[float] = []
        values = [critic.values(mini_batch) for mini_batch in split]
        self.split, raw = with_token_advantages(
            split, values, critic.settings.algorithm, kl_coef=kl_coef, device=critic.device
        )
        """The mini-batches with advantages that are whitened over the step's tokens."""
        self.targets = [
            [_targets(*pair) for pair in zip(*parts, strict=True)]
            for parts in zip(values, raw, strict=True)
        ]
        """[update][micro-batch] -> targets; empty lists except on the last pipeline stage."""

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


def _targets(values_old: Tensor, advantages: np.ndarray) -> ValueTargets:
    returns = values_old.double() + torch.from_numpy(advantages).to(values_old.device)
    return ValueTargets(values_old=values_old, returns=returns.float())
