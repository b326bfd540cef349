"""The base of everything that scores responses in other processes, and its failures."""

from __future__ import annotations

import abc
import logging
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megadapo.algorithm.groups import Steps
from megadapo.data.group import FAILED, MIN_RESPONSES, RewardParts
from megadapo.data.prompts import Prompt
from megadapo.errors import RewardError, RewardOutageError
from megadapo.observe.rollouts.token_pieces import Decode
from megadapo.rewards.config import RewardFunction
from megadapo.rewards.steps import step_ends
from megadapo.rewards.workers.processes import Reply

logger = logging.getLogger(__name__)

MAX_REASONS = 50
"""Number of different failures that are counted separately."""
MAX_TOLD = 5
"""Number of failures that one warning lists."""


class FailureCounts:
    """The failures of one function or environment; safe to use from any thread."""

    def __init__(self, name: str) -> None:
        """`name`: kind and name of what fails, as in "reward function judge"."""
        self._name = name
        self._all: Counter[str] = Counter()
        self._unreported: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, failure: str, prompt_id: str) -> None:
        """Count a failure on a response to a prompt; log it if its reason is new."""
        with self._lock:
            is_known = failure in self._all or len(self._all) >= MAX_REASONS
            reason = failure if failure in self._all or not is_known else "other reasons"
            self._all[reason] += 1
            self._unreported[reason] += 1
        if not is_known:
            logger.warning("%s, prompt %s: %s", self._name, prompt_id, failure)

    def drain_warning(self, given: str, *others: str) -> str | None:
        """Return one line on the failures since the last call, if there were any.

        Args:
            given: what the responses got instead of a score.
            others: what else to tell, before the failures.
        """
        with self._lock:
            failures, self._unreported = self._unreported, Counter()
        parts = [*others]
        if failures:
            reasons = "; ".join(f"{n} x {reason}" for reason, n in failures.most_common(MAX_TOLD))
            parts.append(f"failed on {failures.total()} responses, which {given}: {reasons}")
        return f"{self._name} {'; it '.join(parts)}" if parts else None


@dataclass(frozen=True)
class FunctionScore:
    """One function's score of one response."""

    score: float
    correct: bool
    parts: RewardParts = ()
    failure: str | None = None
    """Reason why the function gave no score."""
    is_outage: bool = False
    """Whether something outside of the function failed, such as its server."""
    steps: Steps = ()
    """Steps of the response, if the function scores them."""


class Runner(abc.ABC):
    """A function that is called in other processes; safe to use from any thread."""

    num_threads = 1
    """Number of groups that it can score at the same time."""

    def __init__(self, config: RewardFunction, decode: Decode | None = None) -> None:
        """`decode`: of the tokenizer; only needed for steps of the text."""
        self.config = config
        self._decode = decode
        self._failures = FailureCounts(f"reward function {config.label}")
        self._num_repeats = 0
        self._lock = threading.Lock()

    @abc.abstractmethod
    def close(self) -> None:
        """End its processes."""

    @abc.abstractmethod
    def _results(
        self, prompt: Prompt, texts: Sequence[str], token_ids: Sequence[np.ndarray]
    ) -> Sequence[Reply]:
        """Return each response's result of `ResultReader.read`, or `{"error", "outage"?}`."""

    def score_group(
        self, prompt: Prompt, texts: Sequence[str], token_ids: Sequence[np.ndarray]
    ) -> list[FunctionScore]:
        """Score the responses to one prompt."""
        results = self._results(prompt, texts, token_ids)
        scores = [
            self._read(result, text, ids)
            for result, text, ids in zip(results, texts, token_ids, strict=True)
        ]
        self._check_outage(scores)
        for score in scores:
            if score.failure is not None:
                self._count_failure(score.failure, prompt)
        return scores

    def drain_warning(self) -> str | None:
        """Return a summary of the failures since the last call, if there were any."""
        with self._lock:
            num_repeats, self._num_repeats = self._num_repeats, 0
        excludes = self.config.reaction(is_outage=False) != "score"
        given = "were left out" if excludes else f"scored {self.config.failure_score:g}"
        repeated = f"could not score a group {num_repeats} times, and it was scored again"
        return self._failures.drain_warning(given, *[repeated] * bool(num_repeats))

    def _check_outage(self, scores: Sequence[FunctionScore]) -> None:
        """Raise RewardOutageError if an outage leaves too few responses, or any must wait."""
        outages = [score.failure for score in scores if score.is_outage]
        reaction = self.config.reaction(is_outage=True)
        num_scored = sum(score.failure is None for score in scores)
        too_few = num_scored < min(MIN_RESPONSES, len(scores))
        if outages and (reaction == "retry" or (reaction == "exclude" and too_few)):
            with self._lock:
                self._num_repeats += 1
            raise RewardOutageError(
                f"reward function {self.config.label} cannot score a group: {outages[-1]}"
            )

    def _read(self, result: Reply, text: str, token_ids: np.ndarray) -> FunctionScore:
        if "error" in result:
            return self._failed(result["error"], is_outage=result.get("outage", False))
        steps = self._steps(result.get("steps", ()), text, token_ids)
        if steps is None:
            return self._failed("its steps cannot be located among the tokens of the response")
        score = result["score"]
        correct = result.get("correct", score > self.config.right_above)
        counted = {}
        if steps:
            mean = sum(value for _, value in steps) / len(steps)
            counted = {"steps": float(len(steps)), "step_mean": mean}
        parts = {**counted, **result["parts"], FAILED: 0.0}
        return FunctionScore(score, correct, tuple(parts.items()), steps=steps)

    def _failed(self, failure: str, *, is_outage: bool = False) -> FunctionScore:
        score = self.config.failure_score
        return FunctionScore(score, False, ((FAILED, 1.0),), failure, is_outage=is_outage)

    def _steps(
        self, scored: Sequence[tuple[int | None, float]], text: str, token_ids: np.ndarray
    ) -> Steps | None:
        """Return the steps with their ends in tokens; None if the text's steps have no such end."""
        if all(end is not None for end, _ in scored):
            return tuple((int(end or 0), score) for end, score in scored)
        assert self._decode is not None, "steps of a text need the tokenizer"
        ends = step_ends(text, token_ids, self.config.separators, self._decode)
        if ends is None:
            return None
        return tuple((end, score) for end, (_, score) in zip(ends, scored, strict=True))

    def _count_failure(self, failure: str, prompt: Prompt) -> None:
        label = self.config.label
        if self.config.on_failure == "stop":
            raise RewardError(
                f"reward function {label} failed on a response to prompt {prompt.id}: {failure}. "
                'Set its on_failure = "exclude" to leave such a response out and continue'
            )
        self._failures.add(failure, prompt.id)
