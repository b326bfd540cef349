"""Compares answers with gold answers, by the string rule and symbolically.

By default the rule decides, and a symbolic cross-check runs later in the background. If the
symbolic comparison decides, scoring waits for it.

The symbolic comparison is math-verify's. It limits its own time with SIGALRM, which works only in a
main thread, and some answers keep it busy for minutes without it. So it runs in separate processes
that can be killed, never in the caller's.
"""

from __future__ import annotations

import logging
import math
import random
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from megadapo.data.group import NO_ANSWER, Score
from megadapo.errors import ConfigError, InfraError
from megadapo.rewards.config import Isolation, RewardConfig
from megadapo.rewards.dapo_math import Rule, extract_answer
from megadapo.rewards.workers.processes import (
    LOST,
    START_TIMEOUT_S,
    TIMEOUT,
    CallError,
    ProcessPool,
    Program,
    Reply,
)

logger = logging.getLogger(__name__)

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
_COUNTED = {TIMEOUT: "num_timeouts", LOST: "num_crashes", "skipped": "num_skipped"}
CHUNK = 8
"""Number of pairs that the workers get at a time, so that they rarely wait for each other."""
MAX_REMEMBERED = 65_536
"""Number of results that are kept; the oldest are forgotten."""
_POOL_ERRORS = (InfraError, OSError, LookupError, TypeError, ValueError)
"""Errors of a pool whose workers fail or send malformed replies."""
MAX_LOST_SHARE = 0.02
"""Share of comparisons that may be lost to time limits and crashes without a warning."""
LOSS_WINDOW = 1024
"""Number of answers over which that share is measured."""
NUM_SYMBOLIC_WORKERS = 2
"""Number of processes for the symbolic comparison, one thread each."""
SYMBOLIC_TIMEOUT_S = 2.0
"""Limit of one symbolic comparison, after which its process is killed: wall-clock time if it
decides, CPU time otherwise."""
SYMBOLIC_SECONDS_PER_MINUTE = 15.0
"""Seconds in any minute that responses may wait for symbolic comparisons that decide; if answers
take longer, the rest is skipped and counted."""
SYMBOLIC_MEMORY_BYTES = 1 << 30
"""Address space of one symbolic process."""
NO_CROSS_CHECK = "answers are not compared symbolically; rewards stay the same: "


@dataclass(frozen=True, kw_only=True)
class VerifierCounts:
    """Counts since the verifier, or the pool, was created."""

    num_scored: int = 0
    num_unanswered: int = 0
    """Responses without an answer."""
    num_only_rule: int = 0
    """Responses that the rule accepts and the symbolic comparison does not."""
    num_only_symbolic: int = 0
    """Responses that the symbolic comparison accepts and the rule does not."""
    num_left_out: int = 0
    """Different answers that were dropped when a later batch came."""
    num_checked: int = 0
    """Symbolic comparisons with a result."""
    num_refused: int = 0
    """Answers that looked slow to compare and were not tried."""
    num_unparsed: int = 0
    """Comparisons in which math-verify could not read the answer or the gold."""
    num_timeouts: int = 0
    num_crashes: int = 0
    num_skipped: int = 0
    """Comparisons left out because earlier ones had used up the time."""

    @property
    def num_disagreements(self) -> int:
        """Number of responses on which the two comparisons differ."""
        return self.num_only_rule + self.num_only_symbolic

    @property
    def num_lost(self) -> int:
        """Number of comparisons lost to time limits and crashes."""
        return self.num_timeouts + self.num_crashes + self.num_skipped


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
        """Fields of `VerifierCounts`."""
        self._busy: deque[tuple[float, float]] = deque()
        """Start and duration of recent batches, in seconds."""
        self._lock = threading.Lock()
        program = Program(
            module="megadapo.rewards.workers.symbolic_worker",
            memory_bytes=memory_bytes,
            idle=idle,
            settings={"isolation": isolation},
        )
        self._processes = ProcessPool(program, num_workers, what="a symbolic worker", advice=ADVICE)
        (answer,) = self._processes.run([{}], START_TIMEOUT_S)
        self.exposed: str = "" if isinstance(answer, CallError) else answer["exposed"]
        """Reason why workers can reach network and files, if the system does not isolate them."""

    @property
    def counts(self) -> VerifierCounts:
        """Counts of its comparisons so far."""
        return VerifierCounts(**self._counts)

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

    def _result(self, reply: Reply | CallError) -> bool | None:
        """Count a reply and return its result."""
        if isinstance(reply, CallError):
            if reply.cause != "closed":
                self._counts[_COUNTED[reply.cause]] += 1
            return None
        if reply["result"] == "unparsed":
            self._counts["num_unparsed"] += 1
            return None
        self._counts["num_checked"] += 1
        return bool(reply["result"] == "equal")


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


class CrossCheck:
    """A thread that compares pairs with a pool of workers; safe to use from any thread.

    If the workers cannot be restarted, there are no further results and no errors.
    """

    def __init__(self, pool: SymbolicPool, on_result: Callable[[Pair, bool | None], None]) -> None:
        """`on_result`: called in the thread with each pair and its result."""
        self._pool = pool
        self._on_result = on_result
        self._waiting: deque[Pair] = deque()
        self._results: dict[Pair, bool | None] = {}
        self._changed = threading.Condition()
        self._is_busy = self._is_closed = False
        self.failure: str | None = None
        """Reason why comparing has stopped."""
        self._thread = threading.Thread(target=self._work, name="cross-check", daemon=True)
        self._thread.start()

    def ask(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Compare different pairs in this order; return the pairs dropped for them.

        If comparing has stopped, all pairs are returned.
        """
        with self._changed:
            if self.failure is not None:
                return list(pairs)
            dropped = list(self._waiting)
            self._waiting = deque(pairs)
            self._changed.notify_all()
        return dropped

    def result(self, pair: Pair) -> bool | None:
        """Return whether a pair is equal; None if that is unknown, or not known yet."""
        return self._results.get(pair)

    def finish(self, timeout_s: float) -> None:
        """Wait until all pairs are compared, at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._waiting or self._is_busy), timeout_s)

    def close(self) -> None:
        """End the thread and its workers."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._pool.close()
        self._thread.join()

    def _work(self) -> None:
        while chunk := self._next_chunk():
            try:
                self._compare(chunk)
            except _POOL_ERRORS as error:
                self._fail(error)
                return

    def _next_chunk(self) -> list[Pair]:
        """Wait for pairs to compare; return none once this is closed."""
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if self._is_closed:
                return []
            self._is_busy = True
            return [self._waiting.popleft() for _ in range(min(CHUNK, len(self._waiting)))]

    def _compare(self, chunk: list[Pair]) -> None:
        new = [pair for pair in chunk if pair not in self._results]
        if new:
            self._results.update(zip(new, self._pool.check_batch(new), strict=True))
            while len(self._results) > MAX_REMEMBERED:
                del self._results[next(iter(self._results))]
        for pair in chunk:
            self._on_result(pair, self._results.get(pair))

    def _fail(self, error: Exception) -> None:
        """Stop comparing; an error while the pool is closed on purpose is no failure."""
        with self._changed:
            if not self._is_closed:
                self.failure = str(error)
            self._waiting.clear()
            self._is_busy = False
            self._changed.notify_all()


class Verifier:
    """A scorer of batches of responses; safe to use from any thread.

    If the rule decides, symbolic processes that cannot be started only cause a warning, and the
    cross-check stops.

    Raises:
        ConfigError: the symbolic processes cannot be started as `reward.isolation` requires.
        InfraError: they cannot be started, and they decide.
    """

    def __init__(
        self, config: RewardConfig, *, symbolic_timeout_s: float = SYMBOLIC_TIMEOUT_S
    ) -> None:
        self._config, self._symbolic_timeout_s = config, symbolic_timeout_s
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        """Fields of `VerifierCounts`."""
        self._num_asked = self._num_lost = 0
        self._scored: dict[Pair, list[bool]] = {}
        """Rule's results by answer and gold, not yet submitted to the cross-check."""
        self._submitted: dict[Pair, list[bool]] = {}
        self._pool: SymbolicPool | None = None
        self._cross_check: CrossCheck | None = None
        self._warnings: list[str] = []
        self._has_reported_failure = False
        if config.symbolic != "off":
            self._pool = self._start_pool()
        if self._pool is not None and config.symbolic == "check":
            self._cross_check = CrossCheck(self._pool, self._take_result)

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def counts(self) -> VerifierCounts:
        """Counts so far, including those of the symbolic processes."""
        symbolic = VerifierCounts() if self._pool is None else self._pool.counts
        return replace(symbolic, **self._counts)

    def score_batch(self, responses: Sequence[str], ground_truths: Sequence[str]) -> list[Score]:
        """Score each response against its gold answer.

        If the rule decides, `symbolic_correct` is None; `cross_checks` returns it later.
        """
        scores = [
            self._config.score(response, gold)
            for response, gold in zip(responses, ground_truths, strict=True)
        ]
        pairs = [self._pair(*both) for both in zip(responses, ground_truths, strict=True)]
        with self._lock:
            self._counts["num_scored"] += len(scores)
            self._counts["num_unanswered"] += sum(score.answer == NO_ANSWER for score in scores)
            if self._cross_check is not None:
                for pair, by_rule in zip(pairs, scores, strict=True):
                    if pair is not None:
                        self._scored.setdefault(pair, []).append(bool(by_rule.correct))
        if self._pool is None or self._cross_check is not None:
            return scores
        compared = [pair for pair in pairs if pair is not None]
        equal = dict(zip(compared, self._pool.check_batch(compared), strict=True))
        self._watch_losses(len(compared))
        decided = []
        for pair, by_rule in zip(pairs, scores, strict=True):
            symbolic = None
            if pair is not None:
                symbolic = equal.get(pair)
                self._count_disagreement(bool(by_rule.correct), symbolic)
            correct = by_rule.correct if symbolic is None else symbolic
            decided.append(Score(1.0 if correct else -1.0, correct, by_rule.answer, symbolic))
        return decided

    def ask_cross_check(self, first: Iterable[tuple[str, str]] = ()) -> None:
        """Start to compare symbolically what was scored since the last call, in the background.

        Answers of the last call that still wait are dropped and counted.

        Args:
            first: (response, gold) to compare first; the others follow in random order.
        """
        if self._cross_check is None:
            return
        with self._lock:
            scored, self._scored = self._scored, {}
            order = [pair for pair in (self._pair(*both) for both in first) if pair in scored]
            rest = list(scored)
            random.Random(0).shuffle(rest)
            dropped = self._cross_check.ask(dict.fromkeys([*order, *rest]))
            for pair in dropped:
                self._submitted.pop(pair, None)
            for pair, by_rule in scored.items():
                if self._cross_check.failure is None:
                    self._submitted.setdefault(pair, []).extend(by_rule)
            self._counts["num_left_out"] += len(dropped)

    def cross_checks(self, responses: Sequence[str], gold: str) -> list[bool | None]:
        """Return the cross-check result of each response so far, None without one."""
        pairs = [self._pair(response, gold) for response in responses]
        if self._cross_check is None:
            return [None] * len(pairs)
        return [None if pair is None else self._cross_check.result(pair) for pair in pairs]

    def finish_cross_check(self, timeout_s: float) -> None:
        """Wait until everything scored has been compared, at most `timeout_s` in all."""
        if self._cross_check is None:
            return
        until = time.monotonic() + timeout_s
        self._cross_check.finish(timeout_s)
        self.ask_cross_check()
        self._cross_check.finish(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """End the symbolic processes."""
        if self._pool is not None:
            self._watch_losses(0, last=True)
            self._pool.close()
        if self._cross_check is not None:
            self._cross_check.close()

    def drain_warnings(self) -> list[str]:
        """Return the problems of the symbolic comparison since the last call."""
        warnings, self._warnings = self._warnings, []
        if (
            self._cross_check is not None
            and self._cross_check.failure
            and not self._has_reported_failure
        ):
            self._has_reported_failure = True
            warnings.append(NO_CROSS_CHECK + self._cross_check.failure)
        return warnings

    def _pair(self, response: str, gold: str) -> Pair | None:
        """Return the answer and gold to compare; None without an answer."""
        answer = extract_answer(response, cast(Rule, self._config.rule))
        return None if answer is None else (answer, gold)

    def _start_pool(self) -> SymbolicPool | None:
        decides = self._config.symbolic == "decide"
        try:
            pool = SymbolicPool(
                num_workers=NUM_SYMBOLIC_WORKERS,
                timeout_s=self._symbolic_timeout_s,
                seconds_per_minute=SYMBOLIC_SECONDS_PER_MINUTE if decides else math.inf,
                memory_bytes=SYMBOLIC_MEMORY_BYTES,
                idle=not decides,
                isolation=self._config.isolation,
            )
        except InfraError as error:
            if self._config.isolation == "require":
                raise ConfigError(str(error)) from error
            if decides:
                raise
            self._warnings.append(NO_CROSS_CHECK + str(error))
            return None
        if pool.exposed:
            self._warnings.append(
                f"symbolic comparisons can reach network and files: {pool.exposed}"
            )
        return pool

    def _take_result(self, pair: Pair, result: bool | None) -> None:
        """Count a cross-check result for every response with this answer and gold."""
        with self._lock:
            by_rule = self._submitted.pop(pair, [])
        for correct in by_rule:
            self._count_disagreement(correct, result)
        self._watch_losses(len(by_rule))

    def _watch_losses(self, num_asked: int, *, last: bool = False) -> None:
        """Warn if too many comparisons have been lost since the last check."""
        assert self._pool is not None
        with self._lock:
            self._num_asked += num_asked
            if self._num_asked < LOSS_WINDOW and not last:
                return
            counts, num_asked, self._num_asked = self._pool.counts, self._num_asked, 0
            num_lost = counts.num_lost - self._num_lost
            self._num_lost = counts.num_lost
        if num_lost > MAX_LOST_SHARE * num_asked:
            logger.warning(
                "symbolic comparisons lost to time limits and crashes: %d for the last %d "
                "answers; since the start: %s",
                num_lost,
                num_asked,
                counts,
            )

    def _count_disagreement(self, by_rule: bool, symbolic: bool | None) -> None:
        """Count a response if the two comparisons differ on it."""
        if symbolic is not None and symbolic != by_rule:
            with self._lock:
                self._counts["num_only_rule" if by_rule else "num_only_symbolic"] += 1
