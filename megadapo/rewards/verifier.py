"""Scores every response: the string rule decides, a symbolic comparison is counted beside it."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from megadapo.rewards.config import RewardConfig
from megadapo.rewards.dapo_math import INVALID, Score, extract_answer, score
from megadapo.rewards.symbolic import SymbolicCounts, SymbolicPool

logger = logging.getLogger(__name__)

MAX_LOST_SHARE = 0.02
"""Comparisons that may be lost to time limits and crashes without a warning."""
LOSS_WINDOW = 1024
"""Answers over which that share is looked at, so that one slow answer is not an alarm."""


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
    symbolic: SymbolicCounts = SymbolicCounts()

    @property
    def num_disagreements(self) -> int:
        """Responses on which the two comparisons differ."""
        return self.num_only_rule + self.num_only_symbolic


class Verifier:
    """Scores batches of responses; safe to use from any thread.

    Raises:
        InfraError: the symbolic processes cannot be started.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._counts = VerifierCounts()
        self._disagreements: deque[Disagreement] = deque(maxlen=100)
        self._num_asked = self._num_lost = 0
        self._pool: SymbolicPool | None = None
        if config.symbolic:
            self._pool = SymbolicPool(
                num_workers=config.symbolic_workers,
                timeout_s=config.symbolic_timeout_s,
                seconds_per_minute=config.symbolic_seconds_per_minute,
                memory_bytes=config.symbolic_memory_mib << 20,
            )

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
        """Score each response against its gold answer."""
        if len(responses) != len(ground_truths):
            raise ValueError(f"{len(responses)} responses for {len(ground_truths)} gold answers")
        scores = [
            score(response, gold, self._config.rule)
            for response, gold in zip(responses, ground_truths, strict=True)
        ]
        symbolic = self._compare_symbolically(responses, ground_truths)
        self._note(responses, ground_truths, scores, symbolic)
        return [self._decide(*both) for both in zip(scores, symbolic, strict=True)]

    def close(self) -> None:
        """End the symbolic processes."""
        if self._pool is not None:
            self._watch_losses(0, last=True)
            self._pool.close()

    def _compare_symbolically(
        self, responses: Sequence[str], ground_truths: Sequence[str]
    ) -> list[bool | None]:
        if self._pool is None:
            return [None] * len(responses)
        answers = [extract_answer(response) for response in responses]
        asked = {
            i: (answer, ground_truths[i]) for i, answer in enumerate(answers) if answer is not None
        }
        equal = dict(zip(asked, self._pool.check_batch(list(asked.values())), strict=True))
        self._watch_losses(len(asked))
        return [equal.get(i) for i in range(len(responses))]

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

    def _decide(self, rule: Score, symbolic_correct: bool | None) -> Score:
        correct = rule.correct
        if self._config.decide == "symbolic" and symbolic_correct is not None:
            correct = symbolic_correct
        return Score(1.0 if correct else -1.0, correct, rule.answer, symbolic_correct)

    def _note(
        self,
        responses: Sequence[str],
        ground_truths: Sequence[str],
        scores: Sequence[Score],
        symbolic: Sequence[bool | None],
    ) -> None:
        differing = [
            Disagreement(extract_answer(response) or INVALID, gold, rule.correct)
            for response, gold, rule, symbolic_correct in zip(
                responses, ground_truths, scores, symbolic, strict=True
            )
            if symbolic_correct is not None and symbolic_correct != rule.correct
        ]
        num_only_rule = sum(case.rule_correct for case in differing)
        with self._lock:
            self._disagreements.extend(differing)
            counts = self._counts
            self._counts = dataclasses.replace(
                counts,
                num_scored=counts.num_scored + len(scores),
                num_unanswered=counts.num_unanswered + sum(s.answer == INVALID for s in scores),
                num_only_rule=counts.num_only_rule + num_only_rule,
                num_only_symbolic=counts.num_only_symbolic + len(differing) - num_only_rule,
            )


def _num_lost(counts: SymbolicCounts) -> int:
    return counts.num_timeouts + counts.num_crashes + counts.num_skipped
