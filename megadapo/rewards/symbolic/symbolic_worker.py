"""The program of one symbolic worker: compares answers with math-verify, in a world of its own.

What it parses was written by a model, and sympy has run such text as code before. So it is kept
from network, files and other processes as far as the system allows, and says where it does not.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Mapping
from typing import Any

from megadapo.rewards.workers import isolation
from megadapo.rewards.workers.function_worker import forbid
from megadapo.rewards.workers.worker import CannotStart, Handler, serve

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
    """Serve comparisons, `{"answer", "gold"}` to `{"verdict"}`, and `{}` to `{"exposed"}`: why this
    process is not isolated, or nothing."""
    serve(_prepare)


def _prepare(settings: Mapping[str, Any]) -> Handler:
    logging.disable(logging.CRITICAL)
    _test_itself()
    exposed = isolate()
    # with what it can still read
    _test_itself()

    def handle(request: Mapping[str, Any]) -> Mapping[str, Any]:
        if not request:
            return {"exposed": exposed}
        return {"verdict": compare(request["answer"], request["gold"])}

    return handle


def _test_itself() -> None:
    for answer, gold, expected in SELF_TEST:
        verdict = compare(answer, gold)
        if verdict != expected:
            raise CannotStart(f"self-test: {answer} against {gold} gave {verdict}, not {expected}")


def isolate() -> str:
    """Give up network, files, rights and the start of processes, and say why where that fails.

    Python's own ways to the network and to processes are closed then, which stops mistakes alone.
    """
    try:
        isolation.drop_privileges(isolation.enter_alone(), max_processes=0)
    except OSError as error:
        forbid(network=True, processes=True)
        # root is not held by it
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        return f"this system does not let user {os.geteuid()} isolate processes ({error})"
    return ""


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
