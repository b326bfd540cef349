"""Interface between groups and the algorithm: numbers only, without tokens, engines or text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

Steps = tuple[tuple[int, float], ...]
"""(end, score) of each step of a response, in order; token end - 1 is the step's last."""


class Branch(NamedTuple):
    """Point at which a response branched off another response of its group."""

    parent: int
    """Index of the other response in the group, lower than the response's own."""
    num_tokens: int
    """Number of leading tokens that the response took from its parent."""


class ScoredGroup(Protocol):
    """One prompt's G responses as numbers; `data.group.Group` implements it."""

    @property
    def rewards(self) -> Sequence[float]:
        """[G] verifier rewards, before shaping."""
        ...

    @property
    def lengths(self) -> Sequence[int]:
        """[G] tokens of each response, end-of-sequence token and tool output included."""
        ...

    @property
    def num_sampled(self) -> Sequence[int]:
        """[G] tokens of each response that the policy sampled: those with a loss."""
        ...

    @property
    def truncated(self) -> Sequence[bool]:
        """[G] whether a response was truncated at the length limit."""
        ...

    @property
    def steps(self) -> Sequence[Steps]:
        """[G] steps of each response, empty if it was scored as a whole; or () if all were."""
        ...

    @property
    def branches(self) -> Sequence[Branch | None]:
        """[G] branch point of each response; None: the response starts at the prompt."""
        ...
