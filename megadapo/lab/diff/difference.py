"""A difference between two runs: its step, phase and place, both values, and the evidence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from megadapo.observe.tables import count

Phase = Literal[
    "rollout",
    "score",
    "selection",
    "advantages",
    "old log-probs",
    "update",
    "weights",
    "optimizer",
    "evaluation",
    "record",
]
"""Part of a step that made a value, in the order in which a step makes them. A "record" is missing
as a whole."""
Row = tuple[str, str, str]
"""Name of a value, and the value in A and in B."""
NO_VALUE = "-"
LONGEST_VALUE = 60
"""Most characters of a value that is shown."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first difference of a phase."""

    step: int
    phase: Phase
    field: str
    """Value that differs: "token", "reward", "policy/loss"."""
    group: int | None = None
    """Prompt index of the group."""
    response: int | None = None
    """Number of the response in its group, from 1 as in `megadapo show`."""
    token: int | None = None
    """Number of the token in its response, from 1."""
    tensor: str | None = None
    rows: tuple[Row, ...] = ()
    evidence: tuple[str, ...] = ()
    """Sentences about the cause and the extent."""

    @property
    def place(self) -> str:
        """The place within the phase, as text."""
        parts = [
            f"{name} {value}"
            for name in ("group", "response", "token", "tensor")
            if (value := getattr(self, name)) is not None
        ]
        own = f": {self.field}" if parts else self.field
        return ", ".join(parts) + own

    def with_evidence(self, *sentences: str) -> Difference:
        return replace(self, evidence=(*self.evidence, *filter(None, sentences)))

    def to_json(self) -> dict[str, Any]:
        """Return the difference as JSON values, with an object of both values for each row."""
        return {**asdict(self), "rows": [{"name": n, "a": a, "b": b} for n, a, b in self.rows]}


def row(name: str, a: object, b: object) -> Row:
    return name, text_of(a), text_of(b)


def differing_rows(pairs: Iterable[tuple[str, object, object]]) -> tuple[Row, ...]:
    """Return a row for each pair whose values differ, bit for bit."""
    return tuple(row(name, a, b) for name, a, b in pairs if not same(a, b))


def same(a: object, b: object) -> bool:
    """Return whether two values are equal; a NaN equals a NaN, and -0.0 does not equal 0.0."""
    if isinstance(a, float) and isinstance(b, float):
        return a.hex() == b.hex()
    return a == b


def text_of(value: object) -> str:
    """Return a value in one short line, numbers in all of their digits."""
    if value is None:
        return NO_VALUE
    # a float32 has the fewest digits that restore it
    text = str(value) if isinstance(value, str | np.generic) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def share(number: int, total: int, noun: str, place: str) -> str:
    """Return a sentence such as "1 of 8 responses differs here."."""
    verb = "differs" if number == 1 else "differ"
    return f"{number} of {count(total, noun)} {verb} {place}."
