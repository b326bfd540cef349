"""The `[algorithm]` section: from a step's rewards to its loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from megadapo.algorithm.bapo import BapoConfig
from megadapo.algorithm.entropy_control import EntropyControlConfig
from megadapo.algorithm.importance import ImportanceConfig
from megadapo.algorithm.kl_control import KlControlConfig
from megadapo.algorithm.objective import TOKEN_GATES, PolicyObjective
from megadapo.section import ModelPath, Section

Aggregation = Literal[
    "token-mean",
    "group-token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-sum-token-mean",
    "token-sum",
    "vl",
    "balanced",
]
AGGREGATIONS_WITH_KEY = {
    "loss_length": ("seq-mean-token-sum-norm", "vl"),
    "length_exponent": ("vl",),
}
"""The values of `loss_aggregation` that read a key."""
AdvantageRule = Literal[
    "grpo", "grpo-process", "rloo", "reinforce++", "reinforce++-baseline", "maxrl", "gae"
]
ADVANTAGES_WITH_KEY = {
    "discount": ("gae", "grpo-process"),
    "gae_lambda": ("gae",),
    "normalize_by_std": ("grpo", "grpo-process"),
}
"""The values of `advantage` that read a key."""

FILTERS = ("overlong_filtering", "degenerate_filtering")
"""Keys that leave responses out of the loss, and not out of their group."""


class ReferenceConfig(Section, title="algorithm.reference"):
    """Reference policy of the KL divergence: the run's first weights, unless a key changes that."""

    path: ModelPath | None = None
    """Hugging Face model that is the reference policy (a teacher), with the policy's tokenizer and
    any sizes; it is on the trainer's ranks and split like the policy. none: no other model."""
    refresh_every: PositiveInt | None = None
    """Number of steps after which the reference policy gets the policy's weights, as in ProRL;
    none: never."""

    def conflicts(self) -> Iterator[str]:
        if self.path is not None and self.refresh_every is not None:
            yield (
                "algorithm.reference.refresh_every follows the policy, and a teacher "
                "(algorithm.reference.path) does not change: leave one of them out"
            )
        if self.path == "":
            yield (
                "algorithm.reference.path must not be empty; leave it out for the run's first "
                "weights"
            )


class PretrainingConfig(Section, title="algorithm.pretraining"):
    """Language-model loss on pretraining data in every update of the policy, in addition to its
    objective (PPO-ptx); off without `data`."""

    data: str | None = None
    """Pretraining data: a parquet, JSONL or CSV file with a column text, a .txt file (one text), a
    folder of such files, a Hub dataset ORG/NAME[@REVISION][/PATH], or a built-in task as for
    data.train, whose texts are problems with their answers; none: no pretraining loss."""
    coef: NonNegativeFloat = 1.0
    """Weight of the mean loss over the text tokens of an update, in nats per token; with 0 the loss
    is measured but changes no gradient."""
    tokens_per_mini_batch: Annotated[int, Field(ge=2)] = 16_384
    """Limit of text tokens in one optimizer update, filled with whole sequences."""
    max_text_tokens: Annotated[int, Field(ge=2)] = 2048
    """Longest sequence in tokens; longer texts are split into several."""

    def conflicts(self) -> Iterator[str]:
        if self.data is None and (changed := self.changed()):
            keys = ", ".join(f"algorithm.pretraining.{key}" for key in changed)
            yield f"{keys}: read only with algorithm.pretraining.data; set that, or leave out"
        if self.data is not None and not self.data.strip():
            yield "algorithm.pretraining.data is empty; leave it out for no pretraining loss"
        if self.max_text_tokens > self.tokens_per_mini_batch:
            yield (
                f"algorithm.pretraining.max_text_tokens = {self.max_text_tokens} does not fit into "
                "algorithm.pretraining.tokens_per_mini_batch = "
                f"{self.tokens_per_mini_batch}: lower it, or raise that"
            )


class AlgorithmConfig(Section, title="algorithm"):
    """Advantages, reward shaping, loss reduction and mini-batches; defaults are DAPO's."""

    responses_per_mini_batch: PositiveInt = 512
    """Responses of one optimizer update; a multiple of sampling.responses_per_prompt."""
    passes: PositiveInt = 1
    """Passes over a step's batch (epochs in PPO, mu in GRPO and DAPO). Old log-probs, values and
    advantages are those of before the first pass; later passes take the mini-batches in a random
    order, drawn from run.seed."""
    max_kl: Annotated[float, Field(gt=0.0)] | None = None
    """Divergence of the policy from the step's old one, in nats per token, above which the rest of
    the step's updates is left out; none: no such limit."""
    advantage: AdvantageRule = "grpo"
    """Advantage of a response or token. grpo: reward less the group's mean, over its standard
    deviation; grpo-process: of each token, from scores of steps; rloo: reward less the mean of the
    others; reinforce++: the reward, whitened over the step's tokens; reinforce++-baseline: reward
    less the group's mean, then whitened; maxrl: reward less the mean, over the mean (rewards of two
    values); gae: of each token, from a critic's values (`[critic]`), whitened over the step's
    tokens."""
    normalize_by_std: bool = True
    """Divide GRPO's advantages by the group's standard deviation (False: Dr. GRPO)."""
    discount: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Discount of a later reward, per token (gae) or per step (grpo-process)."""
    gae_lambda: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Horizon of gae: 1 uses the response's own reward, 0 the critic's next value."""
    loss_aggregation: Aggregation = "token-mean"
    """Reduction of token losses over a mini-batch (see algorithm/loss_weights.py)."""
    loss_length: PositiveInt | None = None
    """Constant divisor, in tokens, of a response's sum with "seq-mean-token-sum-norm" (Dr. GRPO),
    or of the mini-batch with "vl"."""
    length_exponent: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Exponent alpha of "vl": a response of n tokens weighs n^-alpha. 1: the smallest variance;
    0: every token the same, as in Dr. GRPO."""
    overlong_buffer: NonNegativeInt = 4096
    """Number of tokens before rollout.max_response_tokens over which the soft overlong punishment
    grows; 0: no punishment."""
    overlong_factor: NonNegativeFloat = 1.0
    """Scale of the soft overlong punishment."""
    overlong_filtering: bool = False
    """Whether truncated responses are left out of the loss. The punishment still reaches complete
    responses inside the buffer, and the rewards with which a group is compared."""
    gibberish_below: Annotated[float, Field(le=0.0)] = -3.0
    """Mean log-prob of a response's tokens, in nats under the policy that sampled them, below which
    the response counts as gibberish."""
    repetitive_above: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """Share of repeated n-grams (8 tokens) in a response above which it counts as repetitive."""
    degenerate_filtering: bool = False
    """Whether gibberish and repetitive responses are left out of the loss, as truncated ones are
    with overlong_filtering."""
    objective: PolicyObjective = PolicyObjective()
    """Objective per token."""
    bapo: BapoConfig = BapoConfig()
    """Search of the clip bounds of gate "bapo"."""
    reference: ReferenceConfig = ReferenceConfig()
    """Reference policy of the KL divergence."""
    kl_control: KlControlConfig = KlControlConfig()
    """Adaptive coefficients of the KL divergences in the reward and to the old policy."""
    entropy_control: EntropyControlConfig = EntropyControlConfig()
    """Adaptive coefficient of the entropy bonus."""
    pretraining: PretrainingConfig = PretrainingConfig()
    """Language-model loss on pretraining data in addition to the objective."""
    importance: ImportanceConfig = ImportanceConfig()
    """Importance weights of tokens that were sampled by earlier weights."""

    @property
    def compares_steps(self) -> bool:
        """Whether tokens get advantages from scores of steps."""
        return self.advantage == "grpo-process"

    @property
    def compares_responses(self) -> bool:
        """Whether a response has one advantage, which is known before the trainer's forward
        passes."""
        return self.advantage not in ("gae", "grpo-process") and not self.objective.kl_reward_coef

    @property
    def reads_old_policy(self) -> bool:
        """Whether a reference, a critic, a search for clip bounds or a choice of tokens reads the
        old log-probs of a step before its first update."""
        objective = self.objective
        return objective.kl_coef != 0.0 or self.advantage == "gae" or objective.gate in TOKEN_GATES

    def conflicts(self) -> Iterator[str]:
        yield from self._advantage_conflicts()
        yield from self._without_effect()
        if self.objective.kl_coef != 0.0 and self.objective.kl_in == "reward":
            yield from self._kl_reward_conflicts()
        elif self.kl_control.target is not None:
            yield (
                "algorithm.kl_control.target: only the KL divergence in the reward has an adaptive "
                'coefficient: set algorithm.objective.kl_in = "reward" and kl_coef, or leave it '
                "out; for the old policy's in the loss there is algorithm.kl_control.old_target"
            )
        if self.kl_control.old_target is not None and self.objective.old_kl_coef == 0.0:
            yield (
                "algorithm.kl_control.old_target: read only with algorithm.objective.old_kl_coef, "
                "the first coefficient; set that, or leave it out"
            )
        yield from self._aggregation_conflicts()
        if self.objective.gate != "bapo" and self.bapo != BapoConfig():
            yield 'algorithm.bapo: read only with algorithm.objective.gate = "bapo"; leave it out'
        if self.objective.kl_coef == 0.0 and self.reference != ReferenceConfig():
            yield (
                "algorithm.reference: no reference is kept with algorithm.objective.kl_coef = 0; "
                "leave it out, or set that"
            )

    def _aggregation_conflicts(self) -> Iterator[str]:
        with_length = AGGREGATIONS_WITH_KEY["loss_length"]
        if (self.loss_length is not None) != (self.loss_aggregation in with_length):
            names = " or ".join(f'"{name}"' for name in with_length)
            yield (
                f"algorithm.loss_length and algorithm.loss_aggregation = {names} need each other: "
                "set both or neither"
            )
        if self.loss_aggregation != "vl" and self.changed("length_exponent"):
            yield (
                'algorithm.length_exponent: read only with algorithm.loss_aggregation = "vl"; '
                "leave it out"
            )
        if self.loss_aggregation == "balanced" and not self.compares_responses:
            yield (
                'algorithm.loss_aggregation = "balanced" needs the sign of each response\'s '
                'advantage, and with algorithm.advantage = "gae" or "grpo-process", or '
                'algorithm.objective.kl_in = "reward", tokens have advantages of their own: set '
                "another one"
            )

    def _advantage_conflicts(self) -> Iterator[str]:
        for key, rules in ADVANTAGES_WITH_KEY.items():
            if self.advantage not in rules and self.changed(key):
                names = " or ".join(f'"{rule}"' for rule in rules)
                yield f"algorithm.{key}: read only with algorithm.advantage = {names}; leave it out"
        if self.advantage == "maxrl" and self.overlong_buffer > 0:
            yield (
                'algorithm.advantage = "maxrl" needs rewards of two values, and the soft overlong '
                "punishment makes more: set algorithm.overlong_buffer = 0"
            )

    def _without_effect(self) -> Iterator[str]:
        if self.overlong_buffer == 0 and self.changed("overlong_factor"):
            yield (
                "algorithm.overlong_factor: nothing is punished with algorithm.overlong_buffer = "
                "0; leave it out, or set that"
            )
        if self.objective.kl_loss_coef != 0.0 and self.objective.kl_gradient == "k1":
            yield (
                'algorithm.objective.kl_gradient = "k1" has a mean of 0, so the KL divergence '
                'would not change the policy: set it to "k2", or kl_in = "reward"'
            )
        if self.objective.ratio == "none" and self.importance.stale_logprobs == "rollout":
            yield (
                'algorithm.importance.stale_logprobs = "rollout" corrects stale tokens by their '
                'ratio, and algorithm.objective.ratio = "none" has none: set the first to '
                '"recompute"'
            )

    def _kl_reward_conflicts(self) -> Iterator[str]:
        in_reward = 'algorithm.objective.kl_in = "reward"'
        if self.advantage == "grpo" and self.normalize_by_std:
            yield (
                f"{in_reward}: algorithm.normalize_by_std = true would divide the KL divergence by "
                "its own standard deviation where all rewards of a group are equal, whatever its "
                'coefficient: set normalize_by_std = false, or kl_in = "loss"'
            )
        if self.advantage == "maxrl":
            yield (
                f'{in_reward}: algorithm.advantage = "maxrl" needs rewards of two values: set '
                'kl_in = "loss"'
            )
        if self.compares_steps:
            yield (
                f'{in_reward}: algorithm.advantage = "grpo-process" compares steps, and the KL '
                'divergence is taken off whole responses: set kl_in = "loss"'
            )
        filters = [
            f"algorithm.{key} = true" for key in self.changed(*FILTERS) if self.advantage != "gae"
        ]
        if filters:
            yield (
                f"{in_reward}: with {' and '.join(filters)} responses without a loss are "
                "compared with the others, but their KL divergence is not computed: set kl_in = "
                '"loss", or punish them by their reward (algorithm.overlong_buffer)'
            )
        if self.importance.stale_logprobs == "none":
            yield (
                f'{in_reward}: with algorithm.importance.stale_logprobs = "none" the KL divergence '
                'of stale tokens is not computed: set kl_in = "loss", or "recompute"'
            )
