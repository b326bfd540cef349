"""Scores every response: the string rule decides, a symbolic comparison is counted beside it.

Where the symbolic comparison decides, scoring waits for it. Else it is asked later, and nobody
waits for its verdicts.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

from megadapo.data.group import Score
from megadapo.errors import InfraError
from megadapo.rewards.config import RewardConfig
from megadapo.rewards.dapo_math import INVALID, extract_answer, score
from megadapo.rewards.symbolic.cross_check import CrossCheck
from megadapo.rewards.symbolic.symbolic import Pair, SymbolicCounts, SymbolicPool

logger = logging.getLogger(__name__)

MAX_LOST_SHARE = 0.02
"""Comparisons that may be lost to time limits and crashes without a warning."""
LOSS_WINDOW = 1024
"""Answers over which that share is looked at, so that one slow answer is not an alarm."""
NO_SECOND_OPINION = "answers are not compared symbolically, and rewards are what they were: "


@dataclass(frozen=True)
class Disagreement:
    """An answer that only one of the two comparisons accepts."""

    answer: str
    """As the response wrote it."""
    ground_truth: str
    rule_correct: bool


@dataclass(frozen=True, kw_only=True)
class VerifierCounts:
    """What has been scored since the verifier was made."""

    num_scored: int = 0
    num_unanswered: int = 0
    """Responses without an answer where it is looked for."""
    num_only_rule: int = 0
    """Responses that the rule accepts and the symbolic comparison does not."""
    num_only_symbolic: int = 0
    """Responses that the symbolic comparison accepts and the rule does not."""
    num_left_out: int = 0
    """Different answers that were not compared, as those of a later batch came first."""
    symbolic: SymbolicCounts = SymbolicCounts()

    @property
    def num_disagreements(self) -> int:
        """Responses on which the two comparisons differ."""
        return self.num_only_rule + self.num_only_symbolic


class Verifier:
    """Scores batches of responses; safe to use from any thread.

    Symbolic processes that cannot be started, or fail for good, end nothing where the rule decides:
    they are noted, and nothing is compared any more.

    Raises:
        InfraError: the symbolic processes cannot be started, and they are to decide.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._counts = VerifierCounts()
        self._disagreements: deque[Disagreement] = deque(maxlen=100)
        self._num_asked = self._num_lost = 0
        self._unasked: dict[Pair, list[bool]] = {}
        self._asked: dict[Pair, list[bool]] = {}
        """What the rule said of each response with this answer and gold."""
        self._pool: SymbolicPool | None = None
        self._second: CrossCheck | None = None
        self._notes: list[str] = []
        self._has_told_failure = False
        if config.symbolic:
            self._pool = self._start_pool()
        if self._pool is not None and config.decide == "rule":
            self._second = CrossCheck(self._pool, self._take_verdict)

    def __enter__(self) -> Verifier:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def counts(self) -> VerifierCounts:
        """The counts so far, those of the symbolic processes included."""
        if self._pool is None:
            return self._counts
        return dataclasses.replace(self._counts, symbolic=self._pool.counts)

    @property
    def num_disagreements(self) -> int:
        """Responses so far on which the two comparisons differ."""
        return self._counts.num_disagreements

    @property
    def recent_disagreements(self) -> list[Disagreement]:
        """The latest answers that only one comparison accepts, oldest first."""
        return list(self._disagreements)

    def score_batch(self, responses: Sequence[str], ground_truths: Sequence[str]) -> list[Score]:
        """Score each response against its gold answer.

        `symbolic_correct` is None where the rule decides: that verdict comes later, as
        `cross_checks`.
        """
        if len(responses) != len(ground_truths):
            raise ValueError(f"{len(responses)} responses for {len(ground_truths)} gold answers")
        scores = [
            score(response, gold, self._config.rule)
            for response, gold in zip(responses, ground_truths, strict=True)
        ]
        pairs = [_pair(*both) for both in zip(responses, ground_truths, strict=True)]
        self._count(scores)
        if self._second is not None:
            self._keep_for_later(pairs, scores)
        if self._pool is None or self._second is not None:
            return scores
        equal = self._compare_now(pairs)
        for pair, by_rule in zip(pairs, scores, strict=True):
            if pair is not None:
                self._note(pair, by_rule.correct, equal.get(pair))
        return [
            _decided_symbolically(by_rule, None if pair is None else equal.get(pair))
            for pair, by_rule in zip(pairs, scores, strict=True)
        ]

    def ask_cross_check(self, first: Iterable[tuple[str, str]] = ()) -> None:
        """Have what was scored since the last call compared symbolically, in the background.

        What the last call asked for and did not get yet is given up, and counted.

        Args:
            first: (response, gold) of those that are waited for most; the others follow in an
                order that has nothing to do with theirs.
        """
        if self._second is None:
            return
        with self._lock:
            unasked, self._unasked = self._unasked, {}
            order = [pair for pair in (_pair(*both) for both in first) if pair in unasked]
            rest = list(unasked)
            random.Random(0).shuffle(rest)
            given_up = self._second.ask(dict.fromkeys([*order, *rest]))
            for pair in given_up:
                self._asked.pop(pair, None)
            for pair, said in unasked.items():
                if self._second.failure is None:
                    self._asked.setdefault(pair, []).extend(said)
            self._counts = dataclasses.replace(
                self._counts, num_left_out=self._counts.num_left_out + len(given_up)
            )

    def cross_checks(self, responses: Sequence[str], gold: str) -> list[bool | None]:
        """Return what is known by now of each response: None where no verdict is there."""
        pairs = [_pair(response, gold) for response in responses]
        if self._second is None:
            return [None] * len(pairs)
        return [None if pair is None else self._second.verdict(pair) for pair in pairs]

    def finish_cross_check(self, timeout_s: float) -> None:
        """Wait for what was asked, then for what was not asked yet; at most so long in all."""
        if self._second is None:
            return
        until = time.monotonic() + timeout_s
        self._second.finish(timeout_s)
        self.ask_cross_check()
        self._second.finish(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """End the symbolic processes."""
        if self._pool is not None:
            self._watch_losses(0, last=True)
            self._pool.close()
        if self._second is not None:
            self._second.close()

    def drain_warnings(self) -> list[str]:
        """Say what of the symbolic comparison is not as it should be, once."""
        notes, self._notes = self._notes, []
        if self._second is not None and self._second.failure and not self._has_told_failure:
            self._has_told_failure = True
            notes.append(NO_SECOND_OPINION + self._second.failure)
        return notes

    def _start_pool(self) -> SymbolicPool | None:
        config, decides = self._config, self._config.decide == "symbolic"
        try:
            pool = SymbolicPool(
                num_workers=config.symbolic_workers,
                timeout_s=config.symbolic_timeout_s,
                seconds_per_minute=config.symbolic_seconds_per_minute if decides else math.inf,
                memory_bytes=config.symbolic_memory_mib << 20,
                idle=not decides,
            )
        except InfraError as error:
            if decides:
                raise
            self._notes.append(NO_SECOND_OPINION + str(error))
            return None
        if pool.exposed:
            self._notes.append(f"symbolic comparisons can reach network and files: {pool.exposed}")
        return pool

    def _keep_for_later(self, pairs: Sequence[Pair | None], scores: Sequence[Score]) -> None:
        with self._lock:
            for pair, by_rule in zip(pairs, scores, strict=True):
                if pair is not None:
                    self._unasked.setdefault(pair, []).append(by_rule.correct)

    def _take_verdict(self, pair: Pair, verdict: bool | None) -> None:
        """Count a verdict of the second opinion for every response that it is about."""
        with self._lock:
            said = self._asked.pop(pair, [])
        for by_rule in said:
            self._note(pair, by_rule, verdict)
        self._watch_losses(len(said))

    def _compare_now(self, pairs: Sequence[Pair | None]) -> dict[Pair, bool | None]:
        assert self._pool is not None
        asked = [pair for pair in pairs if pair is not None]
        equal = dict(zip(asked, self._pool.check_batch(asked), strict=True))
        self._watch_losses(len(asked))
        return equal

    def _watch_losses(self, num_asked: int, *, last: bool = False) -> None:
        """Warn where too many comparisons have been lost since the last look."""
        assert self._pool is not None
        with self._lock:
            self._num_asked += num_asked
            if self._num_asked < LOSS_WINDOW and not last:
                return
            counts, num_asked, self._num_asked = self._pool.counts, self._num_asked, 0
            num_lost = _num_lost(counts) - self._num_lost
            self._num_lost = _num_lost(counts)
        if num_lost > MAX_LOST_SHARE * num_asked:
            logger.warning(
                "symbolic comparisons lost to time limits and crashes: %d for the last %d "
                "answers; since the start: %s",
                num_lost,
                num_asked,
                counts,
            )

    def _count(self, scores: Sequence[Score]) -> None:
        with self._lock:
            counts = self._counts
            self._counts = dataclasses.replace(
                counts,
                num_scored=counts.num_scored + len(scores),
                num_unanswered=counts.num_unanswered + sum(s.answer == INVALID for s in scores),
            )

    def _note(self, pair: Pair, by_rule: bool, symbolic: bool | None) -> None:
        """Count a response on which the two comparisons differ."""
        if symbolic is None or symbolic == by_rule:
            return
        with self._lock:
            self._disagreements.append(Disagreement(*pair, by_rule))
            counts = self._counts
            self._counts = dataclasses.replace(
                counts,
                num_only_rule=counts.num_only_rule + by_rule,
                num_only_symbolic=counts.num_only_symbolic + (not by_rule),
            )


def _pair(response: str, gold: str) -> Pair | None:
    """What is compared of a response; None where it gives no answer."""
    answer = extract_answer(response)
    return None if answer is None else (answer, gold)


def _decided_symbolically(by_rule: Score, symbolic: bool | None) -> Score:
    correct = by_rule.correct if symbolic is None else symbolic
    return Score(1.0 if correct else -1.0, correct, by_rule.answer, symbolic)


def _num_lost(counts: SymbolicCounts) -> int:
    return counts.num_timeouts + counts.num_crashes + counts.num_skipped
