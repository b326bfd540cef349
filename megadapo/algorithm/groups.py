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


def branches_among(branches: Sequence[Branch | None], kept: Sequence[int]) -> list[Branch | None]:
    """Return the branches of some responses of a group, as if there were no others.

    Args:
        branches: [G] branch points of the group.
        kept: indices of the remaining responses, ascending.
    """

    def num_shared(first: int, second: int) -> int:
        """Return the leading tokens that two responses share; `first` is the lower index."""
        branch = branches[second]
        if branch is None or first == branch.parent:
            return 0 if branch is None else branch.num_tokens
        return min(branch.num_tokens, num_shared(*sorted((first, branch.parent))))

    found: list[Branch | None] = []
    for place, index in enumerate(kept):
        shared = [num_shared(other, index) for other in kept[:place]]
        longest = max(shared, default=0)
        found.append(Branch(shared.index(longest), longest) if longest else None)
    return found


class ScoredGroup(Protocol):
    """One prompt's G responses as numbers; `data.group.Group` implements it."""

    @property
    def rewards(self) -> Sequence[float]:
        """[G] verifier rewards, before shaping."""

    @property
    def lengths(self) -> Sequence[int]:
        """[G] tokens of each response, end-of-sequence token and tool output included."""

    @property
    def num_sampled(self) -> Sequence[int]:
        """[G] tokens of each response that the policy sampled: those with a loss."""

    @property
    def truncated(self) -> Sequence[bool]:
        """[G] whether a response was truncated at the length limit."""

    @property
    def steps(self) -> Sequence[Steps]:
        """[G] steps of each response, empty if it was scored as a whole; or () if all were."""

    @property
    def mean_logprobs(self) -> Sequence[float]:
        """[G] mean log-prob of a response's sampled tokens under the policy that sampled them."""

    @property
    def repetitions(self) -> Sequence[float]:
        """[G] share of a response's n-grams that it has had before."""
