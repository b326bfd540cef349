"""A response with turns as a conversation: which tokens the policy wrote, and what answered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megadapo.data.group import Response, Turn
from megadapo.observe.rollouts.saved_group import SavedResponse

_RETURN = "/return"


@dataclass(frozen=True)
class Part:
    """Successive tokens of a response by one author."""

    start: int
    end: int
    turn: Turn | None
    """Turn whose answer these are; None if the policy sampled them."""


def conversation(response: Response) -> Iterator[Part]:
    """Yield the parts of a response in order; an answer may have no tokens, an action has some."""
    sampled, start = response.is_sampled, 0
    for turn in response.turns:
        answer = start + int(sampled[start : turn.end].sum())
        if start < answer:
            yield Part(start, answer, None)
        yield Part(answer, turn.end, turn)
        start = turn.end
    if start < len(sampled):
        yield Part(start, len(sampled), None)


def environment_of(saved: SavedResponse) -> str | None:
    """Return the name of the environment that a response was played in; None without one."""
    for name, _ in saved.score.parts:
        if name.startswith("environment/") and name.endswith(_RETURN):
            return name.removeprefix("environment/").removesuffix(_RETURN)
    return None
