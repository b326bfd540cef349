"""Reward functions in processes of their own: scores, parts and failures of each response."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from megadapo.data.prompts import Prompt
from megadapo.errors import ConfigError, InfraError, RewardError
from megadapo.rewards.dapo_math import RewardParts
from megadapo.rewards.function_config import RewardFunction
from megadapo.rewards.processes import Lost, ProcessPool, Reply
from megadapo.rewards.worker_process import Program

logger = logging.getLogger(__name__)

FAILED = "failed"
"""The part that says whether a function failed: 1, else 0. Its mean is the share of failures."""
MAX_REASONS = 50
"""Different failures of a function that are told apart."""
MAX_TOLD = 5
"""Of them, those that one note has."""
GRACE_S = 1.0
"""What a group of coroutines may take beyond their own limit."""

Takes = Literal["one", "batch", "async"]


@dataclass(frozen=True)
class FunctionScore:
    """What one function says of one response."""

    score: float
    correct: bool
    parts: RewardParts = ()
    failure: str | None = None
    """Why there is no score of the function itself."""


class FunctionRunner:
    """Calls one function in its processes; safe to use from any thread.

    Raises:
        ConfigError: the function cannot be imported or called.
    """

    def __init__(self, config: RewardFunction, *, num_workers: int | None = None) -> None:
        """`num_workers`: other than the configuration's."""
        self.config = config
        self._failures: Counter[str] = Counter()
        self._untold: Counter[str] = Counter()
        self._lock = threading.Lock()
        try:
            self._pool = ProcessPool(_program(config), num_workers or config.num_workers)
            (told,) = self._pool.run([{"calls": None}], config.timeout_s)
        except InfraError as error:
            raise ConfigError(str(error)) from error
        assert not isinstance(told, Lost), "it answers without calling the function"
        self._takes: Takes = told["takes"]

    def score_group(
        self, prompt: Prompt, texts: Sequence[str], token_ids: Sequence[np.ndarray]
    ) -> list[FunctionScore]:
        """Score the responses to one prompt.

        Raises:
            RewardError: the function failed, and its configuration says to stop then.
            InfraError: its processes can no longer be started.
        """
        calls = [
            [_messages(prompt), text, ids.tolist(), prompt.ground_truth, _extra_info(prompt)]
            for text, ids in zip(texts, token_ids, strict=True)
        ]
        scores = [self._read(result) for result in self._results(calls)]
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

    def close(self) -> None:
        """End its processes."""
        self._pool.close()

    def _results(self, calls: Sequence[Sequence[Any]]) -> list[Reply | str]:
        """The result of each call, or why there is none."""
        whole = self._takes != "one"
        requests = [{"calls": calls}] if whole else [{"calls": [call]} for call in calls]
        # coroutines have their own limits, which leave the others of the group alone
        limit_s = self.config.timeout_s + (GRACE_S if self._takes == "async" else 0.0)
        replies = self._pool.run(requests, limit_s)
        sizes = [len(request["calls"]) for request in requests]
        return [
            result
            for reply, size in zip(replies, sizes, strict=True)
            for result in self._unpack(reply, size)
        ]

    def _unpack(self, reply: Reply | Lost, size: int) -> Sequence[Reply | str]:
        if not isinstance(reply, Lost):
            results: Sequence[Reply] = reply["results"]
            return results
        if reply.kind == "timeout":
            return [f"took longer than {self.config.timeout_s:g} s"] * size
        return [f"its process ended: {reply.detail or reply.kind}"] * size

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


def check_functions(functions: Sequence[RewardFunction]) -> None:
    """Start each function once, and end it again.

    Raises:
        ConfigError: lists every function that cannot be imported or called.
    """
    problems = []
    for config in functions:
        if config.is_in_process:
            continue
        try:
            FunctionRunner(config, num_workers=1).close()
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def _program(config: RewardFunction) -> Program:
    return Program(
        module="megadapo.rewards.function_worker",
        what=f'reward.functions.function = "{config.function}"',
        memory_bytes=config.memory_mib << 20,
        output_bytes=config.output_kib << 10,
        arguments={
            "path": config.path,
            "options": config.options,
            "network": config.network,
            "processes": config.processes,
            "timeout_s": config.timeout_s,
        },
        environment={name: os.environ[name] for name in config.environment if name in os.environ},
    )


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in prompt.messages]


def _extra_info(prompt: Prompt) -> dict[str, Any]:
    return {**prompt.extra_info, "data_source": prompt.data_source}
