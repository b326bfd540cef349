"""What scores responses outside of this process, and what becomes of its failures."""

from __future__ import annotations

import abc
import logging
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megadapo.data.prompts import Prompt
from megadapo.errors import RewardError
from megadapo.rewards.dapo_math import RewardParts
from megadapo.rewards.function_config import RewardFunction
from megadapo.rewards.processes import Lost, Reply

logger = logging.getLogger(__name__)

FAILED = "failed"
"""The part that says whether a function failed: 1, else 0. Its mean is the share of failures."""
MAX_REASONS = 50
"""Different failures of a function that are told apart."""
MAX_TOLD = 5
"""Of them, those that one note has."""


@dataclass(frozen=True)
class FunctionScore:
    """What one function says of one response."""

    score: float
    correct: bool
    parts: RewardParts = ()
    failure: str | None = None
    """Why there is no score of the function itself."""


def lost(reply: Lost, config: RewardFunction) -> str:
    """Why there is no result, where a process gave none."""
    if reply.kind == "timeout":
        return f"took longer than {config.timeout_s:g} s"
    return f"its process ended: {reply.detail or reply.kind}"


class Runner(abc.ABC):
    """One function; safe to use from any thread."""

    num_threads = 1
    """Groups that it can score at the same time."""

    def __init__(self, config: RewardFunction) -> None:
        self.config = config
        self._failures: Counter[str] = Counter()
        self._untold: Counter[str] = Counter()
        self._lock = threading.Lock()

    @abc.abstractmethod
    def close(self) -> None:
        """End its processes."""

    @abc.abstractmethod
    def _results(
        self, prompt: Prompt, texts: Sequence[str], token_ids: Sequence[np.ndarray]
    ) -> Sequence[Reply | str]:
        """`{"score", "correct"?, "parts"}` of each response, or why there is none."""

    def score_group(
        self, prompt: Prompt, texts: Sequence[str], token_ids: Sequence[np.ndarray]
    ) -> list[FunctionScore]:
        """Score the responses to one prompt.

        Raises:
            RewardError: the function failed, and its configuration says to stop then.
            InfraError: its processes can no longer be started.
        """
        results = self._results(prompt, texts, token_ids)
        scores = [self._read(result) for result in results]
        for score in scores:
            if score.failure is not None:
                self._fail(score.failure, prompt)
        return scores

    def take_note(self) -> str | None:
        """Say which failures there were since the last call, if there were any."""
        with self._lock:
            untold, self._untold = self._untold, Counter()
        if not untold:
            return None
        reasons = "; ".join(f"{num} x {reason}" for reason, num in untold.most_common(MAX_TOLD))
        return (
            f"reward function {self.config.label} failed on {untold.total()} responses, which "
            f"scored {self.config.failure_score:g}: {reasons}"
        )

    def _read(self, result: Reply | str) -> FunctionScore:
        failure = result if isinstance(result, str) else result.get("error")
        if failure is not None or isinstance(result, str):
            return FunctionScore(
                self.config.failure_score, False, ((FAILED, 1.0),), str(failure or result)
            )
        score = result["score"]
        correct = result.get("correct", score > self.config.right_above)
        return FunctionScore(score, correct, (*result["parts"].items(), (FAILED, 0.0)))

    def _fail(self, failure: str, prompt: Prompt) -> None:
        label = self.config.label
        if self.config.on_failure == "stop":
            raise RewardError(
                f"reward function {label} failed on a response to prompt {prompt.id}: {failure}. "
                'Set its on_failure = "score" to give it failure_score and go on'
            )
        with self._lock:
            is_known = failure in self._failures or len(self._failures) >= MAX_REASONS
            reason = failure if failure in self._failures or not is_known else "other reasons"
            self._failures[reason] += 1
            self._untold[reason] += 1
        if not is_known:
            logger.warning("reward function %s, prompt %s: %s", label, prompt.id, failure)
