"""Types that the driver and the trainer's ranks exchange; importable without torch or Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from megadapo.algorithm.config import AlgorithmConfig
from megadapo.data.batch import PackedBatch
from megadapo.trainer.config import CriticConfig, ModelConfig, TrainerConfig
from megadapo.weights.disk.files import Files

if TYPE_CHECKING:
    from megadapo.weights.disk.torch_checkpoint import StoredPiece

CRITIC_FOLDER = "critic"
"""Name of the critic's folder in a checkpoint of the trainer."""
REFERENCE_FOLDER = "reference"
"""Name of the reference policy's folder there. It is absent if the reference has the weights with
which the run started."""

RANK_SECONDS = "time/rank_logprobs_{}_s"
"""Time of each rank's pass for old log-probs. Data-parallel ranks do not wait for each other in it
unless they share experts; context-parallel ranks do."""

Metrics = dict[str, int | float | None]
"""Values by their names in observe/metrics/names.py; None: there was nothing to measure."""


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """Configuration of the run as far as a rank needs it."""

    model: ModelConfig
    trainer: TrainerConfig
    algorithm: AlgorithmConfig
    temperature: float
    """Sampling temperature of the rollouts; log-probs are computed at it."""
    seed: int
    critic: CriticConfig | None = None
    trains: Literal["policy", "likelihood", "reward_model"] = "policy"
    """Training of the ranks: a policy by rewards or by the likelihood of given answers, or the
    critic's model alone as a reward model."""
    reads_weights: bool = True
    """Whether the model starts from its folder's weights; False if a checkpoint is loaded next."""
    shares_gpu: bool = False
    """Whether engines use each rank's GPU between its calls, so that it returns cached memory."""

    def lr_at(self, step: int) -> float | None:
        """Return the policy's learning rate; None while only the critic is trained."""
        if self.critic is not None and step <= self.critic.warmup:
            return None
        return self.trainer.optimizer.lr_at(step)


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Address at which the ranks of one trainer meet, and the rank of the receiver."""

    address: str
    port: int
    rank: int
    world_size: int


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateRequest:
    """One step to train on: one optimizer update per mini-batch and pass of the batch."""

    batch: PackedBatch
    step: int
    """Step, counted from 1; it sets the learning rate."""
    policy_version: int
    """Version of the trainer's weights. Tokens that it sampled are fresh, others stale."""
    kl_reward_coef: float | None = None
    """Coefficient of the KL divergence in the reward; None takes the objective's."""
    old_kl_coef: float | None = None
    """Coefficient of the old policy's KL divergence in the loss; None takes the objective's."""
    entropy_coef: float | None = None
    """Coefficient of the entropy bonus; None takes the objective's."""
    checks_first_ratio: bool = True
    """Whether GPUs measure the first ratio, which costs a forward pass if there is one mini-batch.
    CPUs, and updates of several mini-batches, always do."""
    pretraining: PackedBatch | None = None
    """Pretraining data with a mini-batch per update; its language-model loss joins the updates."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedTokens:
    """Response tokens of the recorded sequences, one sequence after another."""

    old: np.ndarray  # [n] float32, old log-probs of the ratio; NaN where a token has no loss
    proximal: np.ndarray
    """[n] float32, the trainer's log-probs before the step's first update; NaN as in `old`."""
    update: np.ndarray  # [n] float32, log-probs in the first update on the sequence
    advantages: np.ndarray
    """[n] float32, NaN unless ranks compute advantages."""

    def merged(self, others: Sequence[RecordedTokens]) -> RecordedTokens:
        """Combine the values of several ranks, each NaN where another rank has the value."""
        whole = {name: values.copy() for name, values in vars(self).items()}
        for other in others:
            for name, values in whole.items():
                np.copyto(values, getattr(other, name), where=np.isnan(values))
        return RecordedTokens(**whole)


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """Numbers of one step's updates. Fields that are compared are the same on every rank.

    `Trainer.update` joins the results of all ranks.
    """

    metrics: Metrics
    num_dropped_tokens: int
    """Response tokens that were left out because the engine gave no finite log-prob."""
    of_ranks: dict[str, tuple[float, ...]] = field(default_factory=dict, compare=False)
    """Values of each rank by metric, with {} for min and max in the name."""
    recorded: RecordedTokens | None = field(default=None, compare=False)
    """Tokens of `PackedBatch.recorded`; None on ranks that have none, or the same as another."""

    @staticmethod
    def joined(results: Sequence[UpdateResult]) -> UpdateResult:
        """Combine the results of all ranks, in order."""
        recorded = [result.recorded for result in results if result.recorded is not None]
        return replace(
            results[0],
            of_ranks={
                name: sum((result.of_ranks[name] for result in results), ())
                for name in results[0].of_ranks
            },
            recorded=recorded[0].merged(recorded[1:]) if recorded else None,
        )


@dataclass
class RankReport:
    """Outcome of a save on one rank."""

    files: Files = field(default_factory=dict)
    pieces: dict[str, list[StoredPiece]] = field(default_factory=dict)
    """Folder relative to the trainer's -> pieces written there."""
    error: str = ""
