"""An adaptive coefficient of the KL divergence in the reward: a proportional controller."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import PositiveFloat, PositiveInt

from megadapo.section import Section

MAX_ERROR = 0.2
"""Limit of the relative error of the KL divergence, of either sign (arXiv 1909.08593)."""


class KlControlConfig(Section, title="algorithm.kl_control"):
    """KL coefficient that follows the measured KL divergence, for the KL divergence in the reward;
    its first value is `algorithm.objective.kl_coef`."""

    target: PositiveFloat | None = None
    """Target of the KL divergence in nats per token, comparable to kl/mean; none: the coefficient
    is constant."""
    horizon: PositiveInt = 10_000
    """Number of responses over which a relative error e of the KL divergence multiplies the
    coefficient by about exp(e)."""

    def conflicts(self) -> Iterator[str]:
        if self.target is None and self.changed("horizon"):
            yield (
                "algorithm.kl_control.horizon: read only with algorithm.kl_control.target; set "
                "that, or leave it out"
            )


class KlController:
    """The KL coefficient of a run; on the driver, so it does not depend on the layout.

    A step multiplies it by 1 + clip(kl / target - 1, +-0.2) n / horizon, for n responses. Source:
    arXiv 1909.08593, section 2.2, whose gain of 0.1 per update is n / horizon here.
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
        if target is not None and kl is not None and math.isfinite(kl):
            error = max(-MAX_ERROR, min(MAX_ERROR, kl / target - 1.0))
            self.coef *= 1.0 + error * num_responses / horizon

    def state_dict(self) -> dict[str, object]:
        """Return the state for a checkpoint: empty if the coefficient is constant."""
        return {} if self._config.target is None else {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the coefficient; keep the configured one if the state has none."""
        if self._config.target is not None:
            self.coef = float(state.get("coef", self.coef))
