"""What the driver and the trainer's ranks exchange; importable without torch or Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

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


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """What one rank had to do in a step: how unevenly it is shared out shows between ranks."""

    num_tokens: int
    """Tokens of the rank's sequences, prompts included; with context parallelism of its part of
    them."""
    logprobs_seconds: float
    """Time for the old log-probs of all of them, a pass in which no data-parallel rank waits for
    another, but for those that share experts; context-parallel ranks do."""
    private_bytes: int
    """Main memory that the rank's process has for itself, at the end of the step's updates."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedTokens:
    """The response tokens of the sequences that were asked for, one sequence after another."""

    old: np.ndarray  # [n] float32, what the ratio is taken against; NaN where a token has no loss
    update: np.ndarray  # [n] float32, in the update that the sequence was trained in
    advantages: np.ndarray
    """[n] float32, where ranks made them, else NaN."""

    def merged(self, others: Sequence[RecordedTokens]) -> RecordedTokens:
        """Put together what several ranks computed, each of them NaN where others have values."""
        whole = {name: values.copy() for name, values in vars(self).items()}
        for other in others:
            for name, values in whole.items():
                np.copyto(values, getattr(other, name), where=np.isnan(values))
        return RecordedTokens(**whole)


@dataclass(frozen=True, kw_only=True)
class Staleness:
    """How far from the present weights a step's tokens were sampled, over those with a loss weight
    and an engine log-prob; None where there was no token to measure."""

    token_share: float | None = None
    """Share of tokens that other weights sampled."""
    mean: float | None = None
    """Publications between sampling and training, 0 for fresh tokens."""
    max: int | None = None
    logprob_drift_mean: float | None = None
    """Mean |trainer - engine| log-prob of the stale tokens, before the first update."""
    logprob_drift_max: float | None = None
    weight_truncated_share: float | None = None
    """Share of the weighted tokens whose importance weight was moved to a bound."""
    weight_masked_share: float | None = None
    """Share of the weighted tokens whose importance weight was set to 0."""


@dataclass(frozen=True, kw_only=True)
class ParityCauses:
    """|trainer - engine| log-prob of some tokens by cause, from scoring them at a second
    micro-batch shape; None where there were none."""

    batch_shape_abs_mean: float | None = None
    """Between the trainer's own log-probs at the two shapes."""
    batch_shape_abs_max: float | None = None
    engine_abs_mean: float | None = None
    """From the engine's log-prob of fresh tokens to the nearest between the trainer's two."""
    engine_abs_max: float | None = None


@dataclass(frozen=True, kw_only=True)
class SearchedBounds:
    """Clip bounds of the ratio that were searched for (gate "bapo"), over the step's updates; None
    where none were, and shares also where there was no token to measure."""

    clip_low: float | None = None
    """Mean."""
    clip_high: float | None = None
    """Mean."""
    share_before: float | None = None
    """Mean share of positive tokens at the bounds where each search began."""
    share: float | None = None
    """Mean at the bounds that were found."""
    share_min: float | None = None
    """Smallest of them."""


@dataclass(frozen=True, kw_only=True)
class ReferenceKl:
    """Estimated KL divergence of the policy before the step's first update to the reference, over
    the step's trained tokens; None without a reference."""

    mean: float | None = None
    max: float | None = None
    """Largest absolute value."""
    coef: float | None = None
    """Weight of the KL divergence in the loss or in the reward."""


@dataclass(frozen=True, kw_only=True)
class PretrainingResult:
    """The language-model loss of the step's texts; None where there were none."""

    loss: float | None = None
    """Mean over their tokens in nats, each under the weights before its update; its coefficient is
    not in it."""
    tokens: int | None = None
    """Text tokens that were predicted."""


@dataclass(frozen=True, kw_only=True)
class CriticResult:
    """What one step's updates did to the critic, over the trained tokens; None without a critic,
    and where nothing could be measured. Values and returns are those before the first update."""

    loss: float | None = None
    """Mean over the mini-batches."""
    explained_variance: float | None = None
    """1 - Var(return - value) / Var(return): 1 where values are right, 0 where a constant were as
    good."""
    value_mean: float | None = None
    return_mean: float | None = None
    clip_fraction: float | None = None
    """Share of tokens whose value had left the band and whose clipped error counted."""
    grad_norm: float | None = None
    """Mean over the applied updates, before clipping."""
    lr: float | None = None
    skipped_updates: int | None = None


@dataclass(frozen=True, kw_only=True)
class ExpertResult:
    """How evenly the tokens of a step were spread over experts before its first update; None for a
    model without experts."""

    balance_loss: float | None = None
    """Load-balancing loss, mean over the layers, without its coefficient: 1 where all experts of a
    layer get as much, more where few get most."""
    max_load: float | None = None
    """Most tokens of one expert against the mean of its layer, over all layers."""


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """What one step's updates did; means are over its trained tokens."""

    loss: float
    """Of the objective, mean over the mini-batches."""
    entropy: float
    """In nats."""
    ratio_mean: float
    ratio_first_max_error: float
    """Largest |ratio - 1| of the first mini-batch, whose weights are still the old ones: 0.0.
    Of the tokens whose old log-probs the trainer computed."""
    clip_low_fraction: float
    clip_high_fraction: float
    dual_clip_fraction: float
    """Share of tokens whose term the bound on bad tokens cut; 0 without one."""
    token_probability_mean: float
    logprob_mean: float
    """Mean log-prob of the trained tokens in nats: minus the loss of a supervised run."""
    positive_gradient_share: float
    """Share of tokens with a positive advantage in the size of the policy term's gradient over the
    log-probs; NaN where that is 0."""
    grad_norm: float
    """Mean over the applied updates, before clipping; NaN if none was applied."""
    lr: float
    skipped_updates: int
    """Mini-batches left out because their loss or gradient was not finite."""
    num_dropped_tokens: int
    """Response tokens left out because the engine gave no finite log-prob."""
    logprob_abs_mean: float
    """Mean |trainer - engine| log-prob of tokens sampled from the present weights; NaN if none."""
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
    """Of each rank; known to the driver alone."""
    recorded: RecordedTokens | None = field(default=None, compare=False)
    """Where sequences were asked for; known to the driver alone."""


@dataclass(frozen=True, kw_only=True)
class RankUpdate:
    """What one rank returns of a step."""

    result: UpdateResult
    """The same on every rank."""
    share: RankShare
    recorded: RecordedTokens | None
    """None on ranks that compute none or the same as another."""
