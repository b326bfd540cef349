"""The second opinion: math-verify in processes of its own that can be killed.

math-verify limits its own time with SIGALRM, which works in a main thread only, and some answers
keep it busy for minutes without it. So it never runs in the caller's process.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megadapo.rewards.symbolic.refusal import refusal
from megadapo.rewards.workers.processes import Lost, ProcessPool, Reply
from megadapo.rewards.workers.worker_process import START_TIMEOUT_S, Program

Pair = tuple[str, str]
"""(answer, gold)."""

HOW_TO_GO_ON = "Set reward.symbolic = false to run without a second opinion"


@dataclass(frozen=True, kw_only=True)
class SymbolicCounts:
    """What became of the comparisons that were asked for since the pool was started."""

    num_checked: int = 0
    """Comparisons that gave a verdict."""
    num_refused: int = 0
    """Answers that could take long by their look, and were not tried."""
    num_unparsed: int = 0
    """Comparisons where math-verify could not read the answer or the gold."""
    num_timeouts: int = 0
    num_crashes: int = 0
    num_skipped: int = 0
    """Comparisons not made because those before them had used up the time there is."""


class SymbolicPool:
    """Worker processes that compare answers symbolically; safe to use from any thread.

    Idle ones run only on cores that nobody else wants, and their limits are of computing time.

    Raises:
        InfraError: a worker cannot start, or does not get known answers right.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        timeout_s: float,
        seconds_per_minute: float,
        memory_bytes: int,
        idle: bool = False,
    ) -> None:
        self._timeout_s = timeout_s
        self._seconds_per_minute = seconds_per_minute
        self._counts = SymbolicCounts()
        self._busy: deque[tuple[float, float]] = deque()
        self._lock = threading.Lock()
        program = Program(
            module="megadapo.rewards.symbolic.symbolic_worker",
            what="a symbolic worker",
            advice=HOW_TO_GO_ON,
            memory_bytes=memory_bytes,
            idle=idle,
        )
        self._processes = ProcessPool(program, num_workers)
        (answer,) = self._processes.run([{}], START_TIMEOUT_S)
        self.exposed: str = "" if isinstance(answer, Lost) else answer["exposed"]
        """Why workers can reach network and files, where the system does not isolate them."""

    @property
    def counts(self) -> SymbolicCounts:
        """The counts so far."""
        return self._counts

    @property
    def process_ids(self) -> list[int]:
        """Of the workers."""
        return self._processes.process_ids

    def check_batch(self, pairs: Sequence[Pair]) -> list[bool | None]:
        """Compare answers with golds; the same pair is compared once, and counted once.

        Returns:
            For each pair whether they are equal, or None where there is no verdict.

        Raises:
            InfraError: the pool is closed, or workers can no longer be started.
        """
        with self._lock:
            asked = [pair for pair in dict.fromkeys(pairs) if self._admits(pair)]
            requests = [{"answer": answer, "gold": gold} for answer, gold in asked]
            started = time.monotonic()
            until = started + self._allowance(started)
            replies = self._processes.run(requests, self._timeout_s, until)
            self._busy.append((started, time.monotonic() - started))
            verdicts = dict(zip(asked, map(self._verdict, replies), strict=True))
            return [verdicts.get(pair) for pair in pairs]

    def close(self) -> None:
        """Kill the workers; a batch that is being compared gets no more verdicts."""
        self._processes.close()

    def _admits(self, pair: Pair) -> bool:
        refused = any(refusal(text) for text in pair)
        self._count("num_refused", int(refused))
        return not refused

    def _verdict(self, reply: Reply | Lost) -> bool | None:
        """What a reply says, counted."""
        if isinstance(reply, Lost):
            if reply.kind != "closed":
                self._count(_COUNTED[reply.kind])
            return None
        if reply["verdict"] == "unparsed":
            self._count("num_unparsed")
            return None
        self._count("num_checked")
        return bool(reply["verdict"] == "equal")

    def _allowance(self, now: float) -> float:
        """Seconds that comparisons may still take in the minute that ends now."""
        while self._busy and self._busy[0][0] < now - 60.0:
            self._busy.popleft()
        return self._seconds_per_minute - sum(seconds for _, seconds in self._busy)

    def _count(self, name: str, num: int = 1) -> None:
        counts = self._counts
        self._counts = dataclasses.replace(counts, **{name: getattr(counts, name) + num})


_COUNTED = {"timeout": "num_timeouts", "crash": "num_crashes", "skipped": "num_skipped"}
