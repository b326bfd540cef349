"""The `[sampling.branching]` section: ARPO's rollouts (arXiv 2507.19849)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from megadapo.section import Section


class BranchingConfig(Section, title="sampling.branching"):
    """ARPO: some responses of a group begin in the middle of another one, behind a tool call."""

    initial_rollouts: PositiveInt | None = None
    """Responses of a group that begin at the prompt (N); the others branch off them, and where too
    few do, begin at the prompt too. None: no response branches."""
    alpha: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """Probability of a branch where the entropy is that of the response's start."""
    beta: NonNegativeFloat = 0.2
    """What a rise of the normalised entropy by 1 adds to that."""
    threshold: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    """A response branches where the probability is above this (tau)."""
    decision: Literal["threshold", "draw"] = "threshold"
    """By the threshold, or by a draw with the probability, which has no threshold."""
    beam_size: Annotated[int, Field(ge=2)] = 2
    """Responses that go on from a branching point, the one that reached it included."""
    num_tokens: PositiveInt = 20
    """Tokens at a response's start, and behind a call, whose mean entropy is taken."""
    top_logprobs: Annotated[int, Field(ge=2, le=20)] = 10
    """Most probable tokens of a position that its entropy is summed over."""

    @property
    def is_on(self) -> bool:
        return self.initial_rollouts is not None

    def conflicts(self) -> Iterator[str]:
        unused = self.changed()
        if not self.is_on and unused:
            keys = ", ".join(f"sampling.branching.{name}" for name in unused)
            yield f"{keys}: read only with sampling.branching.initial_rollouts; leave it out"
        if self.decision == "draw" and "threshold" in unused:
            yield (
                'sampling.branching.threshold: not read with sampling.branching.decision = "draw"; '
                "leave it out"
            )
        if self.decision == "threshold" and self.alpha + self.beta <= self.threshold:
            yield (
                f"sampling.branching.alpha + sampling.branching.beta = {self.alpha + self.beta:g} "
                f"never exceeds sampling.branching.threshold = {self.threshold:g}: no response "
                "would branch"
            )
