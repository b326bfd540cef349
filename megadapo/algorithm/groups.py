"""What the algorithm looks at of a group; nothing of tokens, engines or text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Steps = tuple[tuple[int, float], ...]
"""(end, score) of each step of a response, in order: token end - 1 is its last one."""


class ScoredGroup(Protocol):
    """One prompt's G responses as numbers; `data.batch.Group` is one."""

    @property
    def rewards(self) -> Sequence[float]:
        """[G] the verifier's rewards, before any shaping."""
        ...

    @property
    def lengths(self) -> Sequence[int]:
        """[G] tokens of each response, end-of-sequence token and tools' output included."""
        ...

    @property
    def num_sampled(self) -> Sequence[int]:
        """[G] tokens of each response that the policy wrote: those with a loss."""
        ...

    @property
    def truncated(self) -> Sequence[bool]:
        """[G] whether a response was cut at the length limit."""
        ...

    @property
    def steps(self) -> Sequence[Steps]:
        """[G] the steps of each response, none where it was scored as a whole; or nothing at all
        where all were."""
        ...
