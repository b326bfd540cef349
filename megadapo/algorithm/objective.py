"""Configuration of the policy objective; `reference.py` defines its terms.

An objective is a composition: a ratio, a gate on it, a KL divergence and an entropy bonus. Rules,
sources and where public implementations differ: docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from megadapo.section import Section

MAX_LOG_RATIO = 20.0
"""Bound of every log-ratio: exp(20) is far outside any clip window and still finite."""

Ratio = Literal["token", "sequence", "none"]
Gate = Literal["clip", "bapo", "soft", "weight", "none", "clip_cov", "kl_cov"]
KlEstimator = Literal["k1", "k2", "k3", "corrected-k3"]

KEYS_OF_GATE: dict[str, tuple[str, ...]] = {
    "clip": ("clip_low", "clip_high", "dual_clip"),
    "bapo": ("dual_clip",),
    "soft": ("tau_pos", "tau_neg"),
    "weight": ("weight_max",),
    "none": (),
    "clip_cov": ("clip_low", "clip_high", "cov_share", "cov_low", "cov_high"),
    "kl_cov": ("cov_share", "cov_coef"),
}
"""Keys that each gate reads."""
COVARIANCE_GATES = ("clip_cov", "kl_cov")
"""Gates that choose tokens of a mini-batch by the covariance of log-prob and advantage."""
TOKEN_GATES = ("bapo", *COVARIANCE_GATES)
"""Gates that read the log-probs of all tokens of a mini-batch before its gradient."""


class PolicyObjective(Section, title="algorithm.objective"):
    """Loss of a token, l_t = -gate(r_t, A_t) + kl_coef * KL_t + old_kl_coef * (r_t - 1 - log r_t)
    - entropy_coef * H_t; defaults are DAPO's."""

    ratio: Ratio = "token"
    """Ratio r_t. token: the token's own; sequence: the geometric mean over its sequence (GSPO);
    none: no ratio, the policy term is -A_t log pi_t (REINFORCE)."""
    gate: Gate = "clip"
    """clip: PPO's, decoupled; bapo: the same, bounds searched (`[algorithm.bapo]`); soft: SAPO's
    sigmoid; weight: CISPO's detached, truncated weight; none: r_t A_t; clip_cov: clip, without some
    tokens of a high covariance of log-prob and advantage; kl_cov: none, with a penalty on those of
    the highest."""
    clip_low: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.2
    """Distance below 1 at which the ratio's gradient is cut (A < 0)."""
    clip_high: NonNegativeFloat = 0.28
    """Distance above 1 at which the ratio's gradient is cut (A > 0)."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Upper bound c > 1 on the ratio if the advantage is negative; none in the paper."""
    tau_pos: PositiveFloat = 1.0
    """Temperature of the soft gate if the advantage is positive."""
    tau_neg: PositiveFloat = 1.05
    """Temperature of the soft gate otherwise."""
    weight_max: PositiveFloat | None = None
    """Upper bound of the detached weight, a ratio and not an offset from 1; gate "weight" needs
    it."""
    cov_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.0002
    """Share of a mini-batch's tokens that clip_cov leaves out of the policy term at most, and that
    kl_cov penalises; at least one token."""
    cov_low: float = 1.0
    """Covariance above which clip_cov may leave a token out."""
    cov_high: float = 5.0
    """Covariance from which on it does not."""
    cov_coef: PositiveFloat = 1.0
    """Coefficient of kl_cov's penalty, |log-prob - old log-prob|."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus, which is subtracted from the loss."""
    old_kl_coef: NonNegativeFloat = 0.0
    """Weight in the loss of the KL divergence of the step's old policy to the policy (PPO's
    penalty); it may stand beside the one to the reference policy."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL divergence to the reference policy; DAPO uses none."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Place of the KL divergence: differentiable in the loss, or as a number in the reward."""
    kl_value: KlEstimator = "k3"
    """Estimator of the KL divergence from one sampled token, for the value that is added and
    reported; in the reward it must be k1."""
    kl_gradient: KlEstimator = "k3"
    """Estimator for the derivative, if the KL divergence is in the loss."""

    @property
    def kl_loss_coef(self) -> float:
        """Weight of the KL divergence within the loss."""
        return self.kl_coef if self.kl_in == "loss" else 0.0

    @property
    def kl_reward_coef(self) -> float:
        """Weight of the KL divergence that is subtracted from the rewards."""
        return self.kl_coef if self.kl_in == "reward" else 0.0

    def conflicts(self) -> Iterator[str]:
        yield from self._gate_conflicts()
        yield from self._kl_conflicts()

    def _gate_conflicts(self) -> Iterator[str]:
        if self.old_kl_coef != 0.0 and self.ratio != "token":
            yield (
                "algorithm.objective.old_kl_coef is the weight of a token's own divergence, but "
                f'algorithm.objective.ratio = "{self.ratio}": set it to "token"'
            )
        if self.ratio == "none" and self.gate != "none":
            yield (
                f'algorithm.objective.gate = "{self.gate}" needs a ratio, and '
                'algorithm.objective.ratio is "none": set gate = "none" or ratio = "token"'
            )
        if self.ratio == "sequence" and self.gate in TOKEN_GATES:
            yield (
                f'algorithm.objective.gate = "{self.gate}" is defined on single tokens, but '
                'algorithm.objective.ratio = "sequence": set it to "token"'
            )
        if self.cov_low >= self.cov_high:
            yield (
                f"algorithm.objective.cov_low = {self.cov_low} must be below "
                f"algorithm.objective.cov_high = {self.cov_high}"
            )
        if self.gate == "weight" and self.weight_max is None:
            yield (
                'algorithm.objective.gate = "weight" needs algorithm.objective.weight_max, the '
                "largest weight of a token, such as 5.0"
            )
        gate_keys = {key for keys in KEYS_OF_GATE.values() for key in keys}
        unused = [key for key in self.changed() if key in gate_keys - {*KEYS_OF_GATE[self.gate]}]
        if unused:
            keys = ", ".join(f"algorithm.objective.{key}" for key in unused)
            yield f'{keys}: not read with algorithm.objective.gate = "{self.gate}"; leave out'

    def _kl_conflicts(self) -> Iterator[str]:
        estimators = {"kl_value": self.kl_value, "kl_gradient": self.kl_gradient}
        changed = self.changed("kl_in", *estimators)
        if self.kl_coef == 0.0 and changed:
            keys = ", ".join(f"algorithm.objective.{key}" for key in changed)
            yield f"{keys}: not read with algorithm.objective.kl_coef = 0; leave out, or set that"
        elif self.kl_in == "reward" and self.kl_value != "k1":
            # E[f grad log pi] is the gradient of the KL divergence for f = log pi - log ref alone
            yield (
                f'algorithm.objective.kl_value = "{self.kl_value}": with algorithm.objective.kl_in '
                '= "reward" only "k1" has the gradient of the KL divergence; set it to "k1"'
            )
        if self.kl_coef != 0.0 and self.kl_in == "reward" and "kl_gradient" in changed:
            yield (
                'algorithm.objective.kl_gradient: with algorithm.objective.kl_in = "reward" the KL '
                "divergence is a number and has no gradient; leave it out"
            )
        for key, estimator in estimators.items():
            if estimator == "corrected-k3" and self.ratio == "sequence":
                yield (
                    f'algorithm.objective.{key} = "corrected-k3" weighs a token by its own ratio, '
                    'but algorithm.objective.ratio = "sequence": use k1, k2 or k3'
                )


LIKELIHOOD = PolicyObjective(ratio="none", gate="none")
"""Objective of a language model: with advantages of 1, a token's loss is minus its log-prob."""
