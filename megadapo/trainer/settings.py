"""What the driver tells a trainer rank; importable without torch or Megatron."""

from __future__ import annotations

from dataclasses import dataclass

from megadapo.algorithm.bapo import BapoConfig
from megadapo.algorithm.config import AdvantageRule, ReferenceConfig
from megadapo.algorithm.importance import ImportanceConfig
from megadapo.algorithm.objective import PolicyObjective
from megadapo.trainer.config import CriticConfig, ModelConfig, TrainerConfig

CRITIC_FOLDER = "critic"
"""Folder of the critic's shards in that of the trainer's."""


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """Everything a rank needs to know of the run's configuration."""

    model: ModelConfig
    trainer: TrainerConfig
    objective: PolicyObjective
    bapo: BapoConfig
    importance: ImportanceConfig
    reference: ReferenceConfig
    advantage: AdvantageRule
    """What makes advantages of rewards that a KL divergence was taken off."""
    normalize_by_std: bool
    temperature: float
    """Sampling temperature of the rollouts; log-probs are taken at it."""
    seed: int
    critic: CriticConfig | None = None
    """None: there is no critic."""
    reads_weights: bool = True
    """Whether the model starts from its folder's weights; else a checkpoint is loaded at once."""
    discount: float = 1.0
    gae_lambda: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one trainer find each other."""

    address: str
    port: int
    rank: int
    world_size: int
