"""An entropy target: a coefficient of the entropy bonus that acts while the entropy is too low."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import PositiveFloat

from megadapo.section import Section


class EntropyControlConfig(Section, title="algorithm.entropy_control"):
    """Coefficient of the entropy bonus that keeps the entropy at a target or above; its first value
    is `algorithm.objective.entropy_coef`."""

    target: PositiveFloat | None = None
    """Lowest entropy that is wanted, in nats per token, comparable to policy/entropy; none: the
    coefficient is constant."""
    delta: PositiveFloat = 0.005
    """Change of the coefficient after each step: up at or below the target, else down to 0 at
    most."""
    coef_max: PositiveFloat = 1.0
    """Largest coefficient of the bonus."""

    def conflicts(self) -> Iterator[str]:
        if self.target is None and (changed := self.changed()):
            keys = ", ".join(f"algorithm.entropy_control.{key}" for key in changed)
            yield (
                f"{keys}: read only with algorithm.entropy_control.target; set that, or leave out"
            )


class EntropyController:
    """The coefficient of a run's entropy bonus; on the driver, so it does not depend on the layout.

    The bonus acts in the step after one at or below the target only. Source: arXiv 2505.22312,
    adaptive entropy control, as in TRL 1.10 (trl/trainer/grpo_trainer.py, use_adaptive_entropy, at
    commit f2cd5771), with a smallest coefficient of 0.
    """

    def __init__(self, config: EntropyControlConfig, coef: float) -> None:
        """`coef`: coefficient before the first observation."""
        self._config, self._coef = config, coef
        self._entropy: float | None = None

    @property
    def coef(self) -> float:
        """Coefficient of the next step's bonus."""
        target = self._config.target
        if target is None:
            return self._coef
        return self._coef if self._entropy is not None and self._entropy <= target else 0.0

    @property
    def metrics(self) -> dict[str, float | None]:
        """Metrics of the next step: null without a target."""
        has_target = self._config.target is not None
        return {
            "entropy/target": self._config.target,
            "entropy/coef": self.coef if has_target else None,
        }

    def observe(self, entropy: float | None) -> None:
        """Update the coefficient after a step.

        `entropy`: mean over the step's tokens in nats; one that is not finite is ignored.
        """
        config = self._config
        if config.target is None or entropy is None or not math.isfinite(entropy):
            return
        if entropy <= config.target:
            self._coef = min(self._coef + config.delta, config.coef_max)
        else:
            self._coef = max(self._coef - config.delta, 0.0)
        self._entropy = entropy

    def state_dict(self) -> dict[str, object]:
        """Return the state for a checkpoint: empty if the coefficient is constant."""
        if self._config.target is None:
            return {}
        return {"coef": self._coef, "entropy": self._entropy}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; keep the configured coefficient without one."""
        if self._config.target is not None and "coef" in state:
            self._coef, self._entropy = float(state["coef"]), state["entropy"]
