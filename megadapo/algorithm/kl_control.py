"""An adaptive coefficient of the KL divergence in the reward: a proportional controller."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt

from megadapo.section import Section


class KlControlConfig(Section, title="algorithm.kl_control"):
    """A KL coefficient that follows the measured KL divergence, for the KL divergence in the
    reward; `algorithm.objective.kl_coef` is where it begins."""

    target: PositiveFloat | None = None
    """KL divergence that is aimed at, in nats a token, as kl/mean has it; none: the coefficient
    stays as it is."""
    horizon: PositiveInt = 10_000
    """Responses over which a relative error e of the KL divergence multiplies the coefficient by
    about exp(e)."""
    clamp: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """Largest relative error, of either sign, that is acted on."""

    def conflicts(self) -> Iterator[str]:
        for key in self.changed("horizon", "clamp"):
            if self.target is None:
                yield (
                    f"algorithm.kl_control.{key}: read only with algorithm.kl_control.target; set "
                    "that, or leave it out"
                )


def controlled_coef(coef: float, kl: float, num_responses: int, config: KlControlConfig) -> float:
    """The coefficient after a step: coef (1 + clip(kl / target - 1, +-clamp) n / horizon).

    Source: arXiv 1909.08593, section 2.2, whose gain of 0.1 an update is n / horizon here.

    Args:
        coef: of the step.
        kl: estimate of the step's KL divergence, mean over its tokens in nats.
        num_responses: n, of the step.
    """
    assert config.target is not None, "there is nothing to aim at"
    error = max(-config.clamp, min(config.clamp, kl / config.target - 1.0))
    return coef * (1.0 + error * num_responses / config.horizon)


class KlController:
    """The coefficient of a run, step after step; on the driver, so no layout enters."""

    def __init__(self, config: KlControlConfig, coef: float) -> None:
        """`coef`: of the first step."""
        self.coef = coef
        self._config = config

    def observe(self, kl: float | None, num_responses: int) -> None:
        """Take a finished step in; one without a finite KL divergence changes nothing."""
        if self._config.target is not None and kl is not None and math.isfinite(kl):
            self.coef = controlled_coef(self.coef, kl, num_responses, self._config)

    def state_dict(self) -> dict[str, object]:
        """What a checkpoint holds: nothing where the coefficient stays."""
        return {} if self._config.target is None else {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; from the configuration, if that was without one."""
        if self._config.target is not None:
            self.coef = float(state.get("coef", self.coef))
