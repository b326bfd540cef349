"""The answers of an evaluation under way, on the disk: a run that is killed asks none again.

One JSON line a problem. A kill can tear at most the last line; that problem is asked again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megadapo.errors import InfraError


@dataclass(frozen=True, kw_only=True)
class ProblemResult:
    """What is remembered of a problem's responses: numbers, no texts."""

    accuracy: float
    """Share of correct responses."""
    num_tokens: int
    num_truncated: int
    """Responses that were cut at the length limit."""


class AnswerLog:
    """The file of one evaluation, which lives until that is recorded."""

    def __init__(self, path: Path, scored: str) -> None:
        """Nothing is read or written yet.

        Args:
            scored: names the weights and how their answers are scored; entries under any other
                name are passed over.
        """
        self._path = path
        self._scored = scored

    def read(self) -> dict[str, ProblemResult]:
        """Return the results so far, by digest of the question."""
        try:
            lines = self._path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return {}
        if lines[-1]:
            # whatever is written next must begin a line of its own
            _append(self._path, "\n")
        entries = [entry for line in lines if (entry := _parse(line)) is not None]
        return {
            entry["question"]: ProblemResult(**entry["result"])
            for entry in entries
            if entry["scored"] == self._scored
        }

    def append(self, question: str, result: ProblemResult) -> None:
        """Keep a problem's result.

        Raises:
            InfraError: it could not be written.
        """
        entry = {"scored": self._scored, "question": question, "result": asdict(result)}
        _append(self._path, json.dumps(entry) + "\n")


def answers_path(folder: Path, step: int) -> Path:
    """Where in a run's folder the answers of the evaluation after `step` are."""
    return folder / f"evaluation-{step}.jsonl"


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise InfraError(f"{path} cannot be written: {error.strerror}") from error


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return an entry; None for a line that was torn or is not one."""
    try:
        entry = json.loads(line)
        ProblemResult(**entry["result"])
        return entry if {"scored", "question"} <= entry.keys() else None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
