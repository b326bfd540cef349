"""Types that the driver and the trainer's ranks exchange; importable without torch or Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megadapo.algorithm.bapo import BapoConfig
from megadapo.algorithm.config import AdvantageRule, ReferenceConfig
from megadapo.algorithm.importance import ImportanceConfig
from megadapo.algorithm.objective import PolicyObjective
from megadapo.data.batch import PackedBatch
from megadapo.trainer.config import CriticConfig, ModelConfig, TrainerConfig

CRITIC_FOLDER = "critic"
"""Name of the critic's folder in a checkpoint of the trainer."""


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """Configuration of the run as far as a rank needs it."""

    model: ModelConfig
    trainer: TrainerConfig
    objective: PolicyObjective
    bapo: BapoConfig
    importance: ImportanceConfig
    reference: ReferenceConfig
    advantage: AdvantageRule
    """Rule that turns rewards into advantages, where ranks subtract the KL divergence first."""
    normalize_by_std: bool
    temperature: float
    """Sampling temperature of the rollouts; log-probs are computed at it."""
    seed: int
    critic: CriticConfig | None = None
    reads_weights: bool = True
    """Whether the model starts from its folder's weights; False if a checkpoint is loaded next."""
    discount: float = 1.0
    gae_lambda: float = 1.0

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
    """One rollout step to train on: one optimizer update per mini-batch of the batch."""

    batch: PackedBatch
    step: int
    """Rollout step, counted from 1; it sets the learning rate."""
    policy_version: int
    """Version of the trainer's weights. Tokens that it sampled are fresh, others stale."""
    kl_reward_coef: float | None = None
    """Coefficient of the KL divergence in the reward; None takes the objective's."""
    pretraining: PackedBatch | None = None
    """Pretraining data with as many mini-batches; its language-model loss joins the updates."""


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """Work of one rank in a step; ranks are compared to show imbalance."""

    num_tokens: int
    """Tokens of the rank's sequences, prompts included; with context parallelism, its part."""
    logprobs_seconds: float
    """Time of the pass for old log-probs. Data-parallel ranks do not wait for each other in it
    unless they share experts; context-parallel ranks do."""
    private_bytes: int
    """Private (unshared) main memory of the rank's process after the step's updates."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedTokens:
    """Response tokens of the recorded sequences, one sequence after another."""

    old: np.ndarray  # [n] float32, old log-probs of the ratio; NaN where a token has no loss
    update: np.ndarray  # [n] float32, log-probs in the update that trained the sequence
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
class Staleness:
    """Age of a step's tokens that have a loss weight and an engine log-prob; None without any."""

    token_share: float | None = None
    """Share of tokens sampled from weights other than the trainer's."""
    mean: float | None = None
    """Mean number of publications between sampling and training; fresh tokens have 0."""
    max: int | None = None
    logprob_drift_mean: float | None = None
    """Mean |trainer - engine| log-prob of the stale tokens, before the first update."""
    logprob_drift_max: float | None = None
    weight_truncated_share: float | None = None
    """Share of the weighted tokens whose importance weight was clamped to a bound."""
    weight_masked_share: float | None = None
    """Share of the weighted tokens whose importance weight was set to 0."""


@dataclass(frozen=True, kw_only=True)
class ParityCauses:
    """|trainer - engine| log-prob by cause, over tokens that were scored at a second micro-batch
    shape; None without any."""

    batch_shape_abs_mean: float | None = None
    """Mean distance of the trainer's own log-probs at the two shapes."""
    batch_shape_abs_max: float | None = None
    engine_abs_mean: float | None = None
    """Mean distance of fresh tokens' engine log-prob to the nearest value between the two."""
    engine_abs_max: float | None = None


@dataclass(frozen=True, kw_only=True)
class SearchedBounds:
    """Clip bounds that gate "bapo" found, over the step's updates; None with other gates."""

    clip_low: float | None = None
    """Mean lower bound."""
    clip_high: float | None = None
    """Mean upper bound."""
    share_before: float | None = None
    """Mean share of positive tokens at the start of each search."""
    share: float | None = None
    """Mean share of positive tokens at the bounds that were found."""
    share_min: float | None = None
    """Smallest share of positive tokens at the bounds that were found."""


@dataclass(frozen=True, kw_only=True)
class ReferenceKl:
    """Estimated KL divergence from the reference policy before the step's first update, over the
    trained tokens; None without a reference."""

    mean: float | None = None
    max: float | None = None
    """Largest absolute value."""
    coef: float | None = None
    """Coefficient of the KL divergence in the loss or in the reward."""


@dataclass(frozen=True, kw_only=True)
class PretrainingResult:
    """Language-model loss of the step's pretraining data; None without any."""

    loss: float | None = None
    """Mean over the tokens in nats, before each update and without its coefficient."""
    tokens: int | None = None
    """Number of predicted tokens."""


@dataclass(frozen=True, kw_only=True)
class CriticResult:
    """Numbers of the critic over the trained tokens; None without a critic or without tokens.

    Values and returns are from before the first update."""

    loss: float | None = None
    """Mean over the mini-batches."""
    explained_variance: float | None = None
    """1 - Var(return - value) / Var(return): 1 for exact values, 0 for a constant."""
    value_mean: float | None = None
    return_mean: float | None = None
    clip_fraction: float | None = None
    """Share of tokens whose clipped error was the larger one."""
    grad_norm: float | None = None
    """Mean over the applied updates, before clipping."""
    lr: float | None = None
    skipped_updates: int | None = None


@dataclass(frozen=True, kw_only=True)
class ExpertResult:
    """Balance of the experts before the step's first update; None for models without experts."""

    balance_loss: float | None = None
    """Load-balancing loss without its coefficient, mean over the layers; 1 is even."""
    max_load: float | None = None
    """Largest number of tokens of an expert, relative to its layer's mean, over all layers."""


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """Numbers of one step's updates; means are over its trained tokens."""

    loss: float
    """Loss of the objective, mean over the mini-batches."""
    entropy: float
    """Mean entropy in nats."""
    ratio_mean: float
    ratio_first_max_error: float
    """Largest |ratio - 1| in the first mini-batch, over tokens whose old log-prob the trainer
    computed. The weights are still the old ones, so it should be 0.0."""
    clip_low_fraction: float
    clip_high_fraction: float
    dual_clip_fraction: float
    """Share of tokens that the dual clip bounded; 0 without one."""
    token_probability_mean: float
    logprob_mean: float
    """Mean log-prob in nats: minus the loss of a supervised run."""
    positive_gradient_share: float
    """Share of tokens with a positive advantage in the size of the policy term's gradient over the
    log-probs; NaN where that size is 0."""
    grad_norm: float
    """Mean over the applied updates, before clipping; NaN if none was applied."""
    lr: float
    skipped_updates: int
    """Mini-batches that were skipped because their loss or gradient was not finite."""
    num_dropped_tokens: int
    """Response tokens that were left out because the engine gave no finite log-prob."""
    logprob_abs_mean: float
    """Mean |trainer - engine| log-prob of fresh tokens; NaN without any."""
    logprob_abs_max: float
    tokens_trained: int
    staleness: Staleness = Staleness()
    parity_causes: ParityCauses = ParityCauses()
    searched_bounds: SearchedBounds = SearchedBounds()
    kl: ReferenceKl = ReferenceKl()
    pretraining: PretrainingResult = PretrainingResult()
    critic: CriticResult = CriticResult()
    experts: ExpertResult = ExpertResult()
    shares: tuple[RankShare, ...] = field(default=(), compare=False)
    """Work of each rank; set by the driver."""
    recorded: RecordedTokens | None = field(default=None, compare=False)
    """Tokens of `PackedBatch.recorded`; set by the driver."""


@dataclass(frozen=True, kw_only=True)
class RankUpdate:
    """Answer of one rank to an update request."""

    result: UpdateResult
    """Same on every rank."""
    share: RankShare
    recorded: RecordedTokens | None
    """Recorded tokens; None on ranks that compute no log-probs or the same as another rank."""
