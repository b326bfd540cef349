"""What scores responses outside of this process, and what becomes of its failures."""

from __future__ import annotations

import abc
import logging
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megadapo.algorithm.groups import Steps
from megadapo.data.group import RewardParts
from megadapo.data.prompts import Prompt
from megadapo.errors import RewardError
from megadapo.observe.rollouts.token_pieces import Decode
from megadapo.rewards.function_config import RewardFunction
from megadapo.rewards.steps import step_ends
from megadapo.rewards.workers.processes import Lost, Reply

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
    steps: Steps = ()
    """Of the response, where the function scores them."""


def lost(reply: Lost, config: RewardFunction) -> str:
    """Why there is no result, where a process gave none."""
    if reply.kind == "timeout":
        return f"took longer than {config.timeout_s:g} s"
    return f"its process ended: {reply.detail or reply.kind}"


class Runner(abc.ABC):
    """One function; safe to use from any thread."""

    num_threads = 1
    """Groups that it can score at the same time."""

    def __init__(self, config: RewardFunction, decode: Decode | None = None) -> None:
        """`decode`: the tokenizer's, for steps of the text, which fail without it."""
        self.config = config
        self._decode = decode
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
        """What `ResultReader.read` gives of each response, or why there is nothing."""

    def score_group(
        self, prompt: Prompt, texts: Sequence[str], token_ids: Sequence[np.ndarray]
    ) -> list[FunctionScore]:
        """Score the responses to one prompt.

        Raises:
            RewardError: the function failed, and its configuration says to stop then.
            InfraError: its processes can no longer be started.
        """
        results = self._results(prompt, texts, token_ids)
        scores = [
            self._read(result, text, ids)
            for result, text, ids in zip(results, texts, token_ids, strict=True)
        ]
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

    def _read(self, result: Reply | str, text: str, token_ids: np.ndarray) -> FunctionScore:
        failure = result if isinstance(result, str) else result.get("error")
        if failure is not None or isinstance(result, str):
            return self._failed(str(failure))
        steps = self._steps(result.get("steps", ()), text, token_ids)
        if steps is None:
            return self._failed("its steps cannot be told apart among the tokens of the response")
        score = result["score"]
        correct = result.get("correct", score > self.config.right_above)
        parts = {**_step_parts(steps), **result["parts"], FAILED: 0.0}
        return FunctionScore(score, correct, tuple(parts.items()), steps=steps)

    def _failed(self, failure: str) -> FunctionScore:
        return FunctionScore(self.config.failure_score, False, ((FAILED, 1.0),), failure)

    def _steps(
        self, scored: Sequence[tuple[int | None, float]], text: str, token_ids: np.ndarray
    ) -> Steps | None:
        """Steps as they were returned, those of the text with their ends among the tokens."""
        if all(end is not None for end, _ in scored):
            return tuple((int(end or 0), score) for end, score in scored)
        assert self._decode is not None, "steps of a text need the tokenizer"
        ends = step_ends(text, token_ids, self.config.separators, self._decode)
        if ends is None:
            return None
        return tuple((end, score) for end, (_, score) in zip(ends, scored, strict=True))

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


def _step_parts(steps: Steps) -> dict[str, float]:
    """How many steps a response has, and their mean score; nothing where it has none."""
    if not steps:
        return {}
    return {"steps": float(len(steps)), "step_mean": sum(s for _, s in steps) / len(steps)}
