"""Messages between engines and the host of the environments; all of them can be pickled."""

from __future__ import annotations

from dataclasses import dataclass

from megadapo.environments.environment import Action, Observation
from megadapo.environments.processes import EnvironmentDescription

__all__ = [
    "CAUSES",
    "EnvironmentDescription",
    "Opened",
    "Outcome",
    "RecordedTurn",
    "SampledTurn",
    "cause_of",
]


@dataclass(frozen=True)
class SampledTurn:
    """A turn of the model that an environment answers."""

    digest: str
    """Digest of the turn's sampled token ids; equal for equal ids only."""
    sampled: bytes
    """Token ids, log-probs and policy versions as the engine encodes them, opaque to the host."""
    action: Action


@dataclass(frozen=True)
class Outcome:
    """The answer to a turn: either an observation or a failure."""

    observation: Observation | None
    failure: str | None
    """Reason without an observation: "CAUSE: details", with a cause of `CAUSES`."""
    seconds: float
    """Time that the environment took for it."""


@dataclass(frozen=True)
class RecordedTurn:
    """A turn that was sampled and answered already."""

    sampled: bytes
    outcome: Outcome


@dataclass(frozen=True)
class Opened:
    """An episode that is ready for its next turn, or has failed."""

    observation: Observation | None
    """Observation of `reset`; None if it returned none, or failed."""
    recorded: tuple[RecordedTurn, ...]
    """Turns after those of the response, which continues after the last of them."""
    failure: str | None
    """Reason why the episode cannot continue: "CAUSE: details", with a cause of `CAUSES`."""


CAUSES = {
    "failure": "failure",
    "exception": "exception",
    "wrong result": "exception",
    "timeout": "timeout",
    "lost process": "lost_process",
    "cannot start": "lost_process",
    "no capacity": "no_capacity",
    "not repeatable": "not_continued",
    "interrupted": "not_continued",
    "lost records": "not_continued",
    "journal": "not_continued",
    "wrong call": "not_continued",
}
"""Beginnings of failures, each with its kind in metrics. exception: any but EnvironmentFailure,
which is a "failure". not repeatable: a repeated action was answered differently. interrupted:
`recovery = "once"` does not continue. lost records: the journal lacks turns of the response.
journal: it cannot be written."""


def cause_of(failure: str) -> str:
    """Return the cause with which a failure begins."""
    return failure.partition(":")[0]
