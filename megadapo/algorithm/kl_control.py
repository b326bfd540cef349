"""Adaptive coefficients of KL divergences, by a proportional controller or PPO's doubling."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from megadapo.section import Section

MAX_ERROR = 0.2
"""Limit of the relative error of the KL divergence, of either sign (arXiv 1909.08593)."""

BAND = 1.5
"""Factor above and below the target within which doubling leaves the coefficient as it is."""


class KlControlConfig(Section, title="algorithm.kl_control"):
    """KL coefficients that follow the measured KL divergence: of the one in the reward, and of the
    old policy's in the loss. Their first values are kl_coef and old_kl_coef of
    `[algorithm.objective]`."""

    target: PositiveFloat | None = None
    """Target of the KL divergence in the reward in nats per token, comparable to kl/mean; none: its
    coefficient is constant."""
    rule: Literal["proportional", "doubling"] = "proportional"
    """Rule of the coefficient in the reward. proportional: it grows by the relative error;
    doubling: it doubles above 1.5 times the target and halves below the target / 1.5 (PPO)."""
    old_target: PositiveFloat | None = None
    """Target of the KL divergence of the old policy to the policy in the loss, comparable to
    kl/from_old; its coefficient follows by doubling. none: it is constant."""
    horizon: PositiveInt = 10_000
    """Number of responses over which a relative error e of the KL divergence multiplies the
    coefficient by about exp(e)."""

    @property
    def of_old_policy(self) -> KlControlConfig:
        """The control of old_kl_coef."""
        if self.old_target is None:
            return KlControlConfig()
        return KlControlConfig(target=self.old_target, rule="doubling")

    def conflicts(self) -> Iterator[str]:
        for key in self.changed("horizon", "rule"):
            if self.target is None:
                yield (
                    f"algorithm.kl_control.{key}: read only with algorithm.kl_control.target; set "
                    "that, or leave it out"
                )
        if self.rule == "doubling" and self.changed("horizon"):
            yield (
                'algorithm.kl_control.horizon: not read with algorithm.kl_control.rule = "doubling"'
                "; leave it out"
            )


class KlController:
    """A KL coefficient of a run; on the driver, so it does not depend on the layout.

    Proportional: a step multiplies it by 1 + clip(kl / target - 1, +-0.2) n / horizon, for n
    responses (arXiv 1909.08593, section 2.2, whose gain of 0.1 per update is n / horizon here).
    Doubling: by 2 if kl > 1.5 target, by 1/2 if kl < target / 1.5 (arXiv 1707.06347, section 4).
    """

    def __init__(self, config: KlControlConfig, coef: float) -> None:
        """`coef`: coefficient of the first step."""
        self.coef = coef
        self._config = config

    def observe(self, kl: float | None, num_responses: int) -> None:
        """Update the coefficient after a step.

        `kl`: mean over the step's tokens in nats; one that is not finite is ignored.
        """
        target, horizon = self._config.target, self._config.horizon
        if target is None or kl is None or not math.isfinite(kl):
            return
        if self._config.rule == "proportional":
            error = max(-MAX_ERROR, min(MAX_ERROR, kl / target - 1.0))
            self.coef *= 1.0 + error * num_responses / horizon
        elif kl > BAND * target:
            self.coef *= 2.0
        elif kl < target / BAND:
            self.coef *= 0.5

    def state_dict(self) -> dict[str, object]:
        """Return the state for a checkpoint: empty if the coefficient is constant."""
        return {} if self._config.target is None else {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the coefficient; keep the configured one if the state has none."""
        if self._config.target is not None:
            self.coef = float(state.get("coef", self.coef))
