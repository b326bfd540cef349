"""The program of one symbolic worker: compares answers with math-verify until its input ends.

Started by `symbolic.SymbolicPool` as a process of its own, because what a model writes can keep a
computer algebra system busy for ever, or fill the memory. It limits itself before it reads
anything, and whoever started it may kill it at any time.
"""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import sys
from typing import Any, BinaryIO

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
    """Answer each request line `{"answer", "gold", "cpu_s"}` with a line `{"verdict"}`."""
    replies = _take_stdout()
    memory_bytes, priority = sys.argv[1:]
    try:
        _limit_resources(memory_bytes=int(memory_bytes))
        _self_test()
        # only now: whoever waits for its start waits for a second, on a busy machine too
        if priority == "idle":
            _step_back()
    except (ImportError, MemoryError, OSError, ValueError) as error:
        _send(replies, {"failed": f"{type(error).__name__}: {error}"})
        return
    _send(replies, {"verdict": "ready"})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        _limit_cpu(request["cpu_s"])
        _send(replies, {"verdict": compare(request["answer"], request["gold"])})


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


def _self_test() -> None:
    logging.disable(logging.CRITICAL)
    for answer, gold, expected in SELF_TEST:
        verdict = compare(answer, gold)
        if verdict != expected:
            raise ValueError(f"self-test: {answer} against {gold} gave {verdict}, not {expected}")


def _step_back() -> None:
    """Run only on cores that nobody else wants, where the system knows such a thing."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)


def _limit_resources(memory_bytes: int) -> None:
    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def _limit_cpu(seconds: int) -> None:
    """End this process when the next request takes longer, even if nobody is left to kill it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = math.ceil(usage.ru_utime + usage.ru_stime)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, hard))


def _take_stdout() -> BinaryIO:
    """Keep the reply pipe for replies: whatever a library prints goes nowhere."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    return replies


def _send(replies: BinaryIO, message: dict[str, str]) -> None:
    replies.write(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
