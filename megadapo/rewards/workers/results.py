"""What a reward function returned, as JSON values."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megadapo.rewards.steps import COMBINE, StepScore, split_steps

MAX_PARTS = 32
MAX_NAME = 64
"""Characters of a part's name."""
_OWN = ("score", "correct", "steps")


class WrongResult(Exception):
    """A function returned something that is no score."""


@dataclass(frozen=True, kw_only=True)
class ResultReader:
    """How the results of one function are read."""

    step_separators: Sequence[str] = ()
    step_score: StepScore = "min"

    def read(self, value: Any, *, text: str, num_tokens: int) -> Mapping[str, Any]:
        """A returned number or dict as `{"score", "correct"?, "parts", "steps"?}`.

        A step is `[end, score]`, with the end in tokens, or None where it is that of the text's.

        Raises:
            WrongResult: it is neither, or has something in it that it cannot have.
        """
        if not isinstance(value, dict):
            return {"score": _number(value), "parts": {}}
        if "score" not in value and "steps" not in value:
            raise WrongResult('returned a dict without "score"')
        result: dict[str, Any] = {"parts": _parts(value)}
        if "steps" in value:
            result["steps"] = self._steps(value["steps"], text, num_tokens)
        if "score" in value:
            result["score"] = _number(value["score"])
        else:
            scores = [score for _, score in result["steps"]]
            result["score"] = _number(COMBINE[self.step_score](scores), "the score of its steps")
        if "correct" in value:
            result["correct"] = bool(value["correct"])
        return result

    def _steps(self, steps: Any, text: str, num_tokens: int) -> list[tuple[int | None, float]]:
        if not isinstance(steps, list | tuple):
            raise WrongResult(f"returned {type(steps).__name__} as steps, not a list")
        if not steps:
            raise WrongResult("returned no steps")
        if not any(isinstance(step, list | tuple) for step in steps):
            self._check_num_steps(len(steps), text)
            return [(None, _number(score, "a step")) for score in steps]
        ends = [0]
        for step in steps:
            start, stop = _span(step)
            if not ends[-1] <= start < stop <= num_tokens:
                raise WrongResult(
                    f"returned a step of tokens {start} to {stop} behind token {ends[-1]} of "
                    f"{num_tokens}: steps must be in order, in the response, and not overlap"
                )
            ends.append(stop)
        return [
            (end, _number(step[2], "a step")) for end, step in zip(ends[1:], steps, strict=True)
        ]

    def _check_num_steps(self, num_scores: int, text: str) -> None:
        if not self.step_separators:
            raise WrongResult(
                "returned steps without spans, and reward.functions.step_separators is empty"
            )
        if num_scores != (expected := len(split_steps(text, self.step_separators))):
            raise WrongResult(
                f"returned scores of {num_scores} steps; by reward.functions.step_separators there "
                f"are {expected}"
            )


def _span(step: Any) -> tuple[int, int]:
    """The first and the last token + 1 of a step."""
    if isinstance(step, list | tuple) and len(step) == 3:
        start, stop = step[:2]
        if isinstance(start, numbers.Integral) and isinstance(stop, numbers.Integral):
            return int(start), int(stop)
    raise WrongResult(f"returned a {type(step).__name__} as a step that is no (start, stop, score)")


def _parts(value: Mapping[Any, Any]) -> dict[str, float]:
    names = [name for name in value if name not in _OWN]
    if len(names) > MAX_PARTS or any(
        not isinstance(name, str) or not 0 < len(name) <= MAX_NAME for name in names
    ):
        raise WrongResult(
            f"returned parts that are not at most {MAX_PARTS} names of up to {MAX_NAME} characters"
        )
    return {name: _number(value[name], name) for name in names}


def _number(value: Any, part: str = "") -> float:
    of_part = f" as {part}" if part else ""
    if not isinstance(value, numbers.Real):
        raise WrongResult(f"returned {type(value).__name__}{of_part}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise WrongResult(f"returned {number}{of_part}")
    return number
