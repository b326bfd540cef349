"""The program of one symbolic worker: compares answers with math-verify."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from megadapo.rewards.worker import CannotStart, Handler, serve

SELF_TEST = (
    (r"\frac{1}{2}", "0.5", "equal"),
    ("42.", "42", "equal"),
    (r"2\sqrt{3}", r"\sqrt{12}", "equal"),
    ("(1,2)", "(1, 2)", "equal"),
    ("41", "42", "different"),
    (r"\frac{1}{3}", "0.3", "different"),
    ("-7", "7", "different"),
)
"""(answer, gold, verdict) that every worker must get right before it is given work.

They also load what sympy and the parser load on first use, which would count against the first
answer's time.
"""


def main() -> None:
    """Serve comparisons, `{"answer", "gold"}` to `{"verdict"}`."""
    serve(_prepare)


def _prepare(settings: Mapping[str, Any]) -> Handler:
    logging.disable(logging.CRITICAL)
    for answer, gold, expected in SELF_TEST:
        verdict = compare(answer, gold)
        if verdict != expected:
            raise CannotStart(f"self-test: {answer} against {gold} gave {verdict}, not {expected}")
    return lambda request: {"verdict": compare(request["answer"], request["gold"])}


def compare(answer: str, gold: str) -> str:
    """Say whether two answers are "equal", "different", or at least one is "unparsed"."""
    from math_verify import verify

    try:
        left, right = _parse(gold), _parse(answer)
        if not left or not right:
            return "unparsed"
        equal = verify(left, right, timeout_seconds=None, raise_on_error=True)
    except MemoryError:
        # The process is of no more use; its end is counted as a crash.
        raise
    except Exception:
        # A computer algebra system fed with anything at all raises anything at all.
        return "unparsed"
    return "equal" if equal else "different"


def _parse(text: str) -> list[Any]:
    """The expressions a text can mean; math-verify reads LaTeX only where it is marked as such."""
    from math_verify import parse

    text = text.strip().strip("*").strip()
    marked = text if "$" in text or r"\boxed" in text else f"${text}$"
    for candidate in (marked, text):
        found: list[Any] = parse(candidate, parsing_timeout=None, raise_on_error=True)
        # A result of strings alone is text that was not understood.
        if any(not isinstance(expression, str) for expression in found):
            return found
    return []


if __name__ == "__main__":
    main()
