"""The program of a symbolic worker: compares answers with math-verify, in isolation.

It parses text that a model wrote, and sympy has run such text as code before. So it is isolated
from network, files and other processes as far as the system allows, and reports if it is not.
"""

from __future__ import annotations

import logging
import re
import resource
from collections.abc import Mapping
from typing import Any

from megadapo.rewards.workers import isolation
from megadapo.rewards.workers.worker import CannotStart, Handler, forbid, serve

SELF_TEST = (
    (r"\frac{1}{2}", "0.5", "equal"),
    ("42.", "42", "equal"),
    (r"2\sqrt{3}", r"\sqrt{12}", "equal"),
    ("(1,2)", "(1, 2)", "equal"),
    ("41", "42", "different"),
    (r"\frac{1}{3}", "0.3", "different"),
    ("-7", "7", "different"),
)
"""(answer, gold, result) that every worker must get right before it gets requests.

They also trigger the lazy imports of sympy and the parser, which would slow down the first answer.
"""


_COMMAND = re.compile(r"\\[A-Za-z]+|\b(?:arc)?(?:sin|cos|tan|cot|sec|csc|log|exp|sqrt|frac)\b")
_NAME = re.compile(r"[A-Za-z]{3,}|\b(?:[kcm]m|[km]g|ml|ft|in|oz|lb)\b|_\{?[0-9]+")
"""Words, units and bases, which must be the same in two answers that have any."""


def main() -> None:
    """Serve comparisons, `{"answer", "gold"}` to `{"result"}`, and `{}` to `{"exposed"}`.

    The latter is why this process is not isolated, or empty.
    """
    serve(_prepare)


def _prepare(settings: Mapping[str, Any]) -> Handler:
    logging.disable(logging.CRITICAL)
    _test_itself()
    exposed = isolate(settings["isolation"])
    # again, since it can no longer read all files
    _test_itself()

    def handle(request: Mapping[str, Any]) -> Mapping[str, Any]:
        if not request:
            return {"exposed": exposed}
        return {"result": compare(request["answer"], request["gold"])}

    return handle


def _test_itself() -> None:
    for answer, gold, expected in SELF_TEST:
        result = compare(answer, gold)
        if result != expected:
            raise CannotStart(f"self-test: {answer} against {gold} gave {result}, not {expected}")


def isolate(setting: str = "auto") -> str:
    """Drop access to network, files, privileges and new processes; return why if that fails.

    In that case only Python's own functions for network and processes are blocked, which prevents
    mistakes but no attack.

    Raises:
        CannotStart: the setting is "require", and the system does not isolate processes.
    """
    try:
        user = isolation.enter(setting, alone=True)
        isolation.drop_privileges(user, max_processes=0)
    except (CannotStart, OSError) as error:
        if setting == "require":
            raise
        forbid(network=True, processes=True)
        # root ignores this limit
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        return str(error)
    return ""


def compare(answer: str, gold: str) -> str:
    """Return "equal", "different", or "unparsed" if an answer cannot be read."""
    from math_verify import verify

    names = [sorted(_NAME.findall(_COMMAND.sub(" ", text))) for text in (answer, gold)]
    if all(names) and names[0] != names[1]:
        # math-verify drops units and bases, and reads words as products of their letters
        return "unparsed"
    try:
        left, right = _parse(gold), _parse(answer)
        if not left or not right:
            return "unparsed"
        equal = verify(left, right, timeout_seconds=None, raise_on_error=True)
    except MemoryError:
        # the process cannot continue; its end is counted as a crash
        raise
    except Exception:
        # a computer algebra system may raise any exception on arbitrary text
        return "unparsed"
    return "equal" if equal else "different"


def _parse(text: str) -> list[Any]:
    """Return the expressions in a text; math-verify reads LaTeX only if it is marked as such."""
    from math_verify import parse

    text = text.strip().strip("*").strip()
    marked = text if "$" in text or r"\boxed" in text else f"${text}$"
    for candidate in (marked, text):
        found: list[Any] = parse(candidate, parsing_timeout=None, raise_on_error=True)
        # a result of strings only means that the text was not understood
        if any(not isinstance(expression, str) for expression in found):
            return found
    return []
