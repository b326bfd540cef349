"""The symbolic comparison: math-verify in separate processes that can be killed.

math-verify limits its own time with SIGALRM, which works only in a main thread, and some answers
keep it busy for minutes without it. So it never runs in the caller's process.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from megadapo.rewards.config import Isolation
from megadapo.rewards.workers.processes import START_TIMEOUT_S, Lost, ProcessPool, Program, Reply

Pair = tuple[str, str]
"""Answer and gold answer."""

MAX_CHARS = 512
MAX_DEPTH = 12
"""Depth of nested brackets; the LaTeX parser's time grows exponentially with it."""
ADVICE = 'Set reward.symbolic = "off" to run without the symbolic comparison'

_REFUSED = (
    (re.compile(r"\d{41}"), "a number of more than 40 digits"),
    (re.compile(r"(\^|\*\*)[({\s]*[-+]?\s*\d{4}"), "an exponent of four or more digits"),
    (re.compile(r"[)\]}]\s*(\^|\*\*)[({\s]*\d{3}"), "a large power of an expression"),
    (re.compile(r"\d[\s})]*(\^|\*\*)[({\s]*\d+[\s})]*(\^|\*\*)"), "a power of a power"),
    (re.compile(r"\d{3}[\s)}\]]*!|![\s)}\]]*!"), "a large or repeated factorial"),
    (re.compile(r"\\(sum|prod|int|lim|[dt]?binom|bigcup|bigcap)"), "a long computation"),
    (re.compile(r"[\x00-\x08\x0e-\x1f\x7f]"), "control characters"),
)


@dataclass(frozen=True, kw_only=True)
class SymbolicCounts:
    """Outcomes of the comparisons since the pool was started."""

    num_checked: int = 0
    """Comparisons with a result."""
    num_refused: int = 0
    """Answers that looked slow to compare and were not tried."""
    num_unparsed: int = 0
    """Comparisons in which math-verify could not read the answer or the gold."""
    num_timeouts: int = 0
    num_crashes: int = 0
    num_skipped: int = 0
    """Comparisons left out because earlier ones had used up the time."""


class SymbolicPool:
    """Worker processes that compare answers symbolically; safe to use from any thread.

    Idle workers run only on otherwise idle cores, and their limits count CPU time.

    Raises:
        InfraError: a worker cannot start, or compares known answers wrongly.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        timeout_s: float,
        seconds_per_minute: float,
        memory_bytes: int,
        idle: bool = False,
        isolation: Isolation = "auto",
    ) -> None:
        self._timeout_s = timeout_s
        self._seconds_per_minute = seconds_per_minute
        self._counts: Counter[str] = Counter()
        """Fields of `SymbolicCounts`."""
        self._busy: deque[tuple[float, float]] = deque()
        """Start and duration of recent batches, in seconds."""
        self._lock = threading.Lock()
        program = Program(
            module="megadapo.rewards.workers.symbolic_worker",
            what="a symbolic worker",
            advice=ADVICE,
            memory_bytes=memory_bytes,
            idle=idle,
            arguments={"isolation": isolation},
        )
        self._processes = ProcessPool(program, num_workers)
        (answer,) = self._processes.run([{}], START_TIMEOUT_S)
        self.exposed: str = "" if isinstance(answer, Lost) else answer["exposed"]
        """Reason why workers can reach network and files, if the system does not isolate them."""

    @property
    def counts(self) -> SymbolicCounts:
        """Counts so far."""
        return SymbolicCounts(**self._counts)

    @property
    def process_ids(self) -> list[int]:
        """Pids of the workers."""
        return self._processes.process_ids

    def check_batch(self, pairs: Sequence[Pair]) -> list[bool | None]:
        """Compare answers with golds; equal pairs are compared and counted once.

        Returns:
            Whether each pair is equal, or None without a result.
        """
        with self._lock:
            different = list(dict.fromkeys(pairs))
            allowed = [pair for pair in different if not any(refusal(text) for text in pair)]
            self._counts["num_refused"] += len(different) - len(allowed)
            requests = [{"answer": answer, "gold": gold} for answer, gold in allowed]
            started = time.monotonic()
            # the budget is per minute: older uses no longer count
            while self._busy and self._busy[0][0] < started - 60.0:
                self._busy.popleft()
            left_s = self._seconds_per_minute - sum(seconds for _, seconds in self._busy)
            replies = self._processes.run(requests, self._timeout_s, started + left_s)
            self._busy.append((started, time.monotonic() - started))
            results = dict(zip(allowed, map(self._result, replies), strict=True))
            return [results.get(pair) for pair in pairs]

    def close(self) -> None:
        """Kill the workers; a batch in progress gets no further results."""
        self._processes.close()

    def _result(self, reply: Reply | Lost) -> bool | None:
        """Count a reply and return its result."""
        if isinstance(reply, Lost):
            if reply.kind != "closed":
                self._counts[_COUNTED[reply.kind]] += 1
            return None
        if reply["result"] == "unparsed":
            self._counts["num_unparsed"] += 1
            return None
        self._counts["num_checked"] += 1
        return bool(reply["result"] == "equal")


_COUNTED = {"timeout": "num_timeouts", "crash": "num_crashes", "skipped": "num_skipped"}


def refusal(text: str) -> str | None:
    """Return why an answer is not compared symbolically, or None if it may be.

    The time limit would stop such answers too, but only late and at the price of a worker. A policy
    that learns to write them would slow down every step.
    """
    if len(text) > MAX_CHARS:
        return f"more than {MAX_CHARS} characters"
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        return f"brackets nested more than {MAX_DEPTH} deep"
    return next((reason for pattern, reason in _REFUSED if pattern.search(text)), None)
