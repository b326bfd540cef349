"""Scores every response: the reward is the weighted sum of the scores of reward.functions."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from megadapo.algorithm.advantages import ROUNDING
from megadapo.algorithm.groups import Steps
from megadapo.data.group import Failure, Score
from megadapo.data.prompts import Prompt
from megadapo.data.rows import ALL_COLUMNS
from megadapo.errors import ConfigError, RewardError
from megadapo.observe.rollouts.token_pieces import Decode
from megadapo.rewards.config import ENVIRONMENT, RewardConfig, RewardFunction
from megadapo.rewards.function_runners import FailureCounts, Runner, start_runner
from megadapo.rewards.verifier import Verifier

logger = logging.getLogger(__name__)


class Scorer:
    """The rule and all other reward functions; safe to use from any thread.

    Raises:
        ConfigError: a function cannot be imported or called.
        InfraError: a process cannot be started.
    """

    def __init__(self, config: RewardConfig, decode: Decode | None = None) -> None:
        """`decode`: of the tokenizer; for functions that score steps of the text."""
        self._config = config
        self._is_rule_alone = config.is_rule_alone
        self._of_environments: dict[str, FailureCounts] = {}
        self._lock = threading.Lock()
        if not config.compares_symbolically:
            config = config.model_copy(update={"symbolic": "off"})
        with ExitStack() as stack:
            self.verifier = stack.enter_context(Verifier(config))
            """Comparison of answers, by the rule and symbolically."""
            self._runners: dict[str, Runner] = {}
            for function in config.functions:
                if not function.is_in_process:
                    self._runners[function.label] = runner = start_runner(
                        function, decode, config.isolation
                    )
                    stack.callback(runner.close)
            self._started = stack.pop_all()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def check_prompts(self, prompts: Collection[Prompt]) -> None:
        """Check that each function has prompts with its columns; warn of data_sources without any.

        Raises:
            ConfigError: a function would never be called, or lacks a column.
        """
        for prompt in prompts:
            for runner in self._runners.values():
                place = f"the row of prompt {prompt.id}"
                runner.check_columns(prompt.data_source, prompt.further, place)
        found = [*dict.fromkeys(prompt.data_source for prompt in prompts)]
        listed, problems = ", ".join(map(json.dumps, found)), []
        for number, one in enumerate(self._config.functions):
            absent = [name for name in one.data_sources if name not in found]
            entry = f"reward.functions[{number}] ({one.label})"
            if absent and len(absent) == len(one.data_sources):
                problems.append(
                    f"{entry} has no prompts: none has its data_sources; prompts have {listed}"
                )
            elif absent:
                names = ", ".join(map(json.dumps, absent))
                logger.warning("%s: no prompt has %s; prompts have %s", entry, names, listed)
        if problems:
            raise ConfigError("\n".join(problems))

    def score_group(
        self,
        prompt: Prompt,
        texts: Sequence[str],
        token_ids: Sequence[np.ndarray],
        returns: Sequence[float] = (),
    ) -> list[Score]:
        """Score the responses to one prompt.

        Args:
            token_ids: [n] int32 of each response.
            returns: what each response has earned in its environment, if it had one.
        """
        if self._is_rule_alone:
            return self.verifier.score_batch(texts, [prompt.ground_truth] * len(texts))
        applying = [
            function
            for function in self._config.functions
            if function.applies_to(prompt.data_source)
        ]
        columns = [self._score(one, prompt, texts, token_ids, returns) for one in applying]
        rows = [*zip(*columns, strict=True)]
        size = max((_size(applying, row) for row in rows), default=0.0)
        return _without_rounding([_combined(applying, row) for row in rows], size)

    def check_step(self) -> None:
        """Raise RewardError if a function failed on all responses since the last call."""
        for runner in self._runners.values():
            runner.check_step()

    @property
    def further_columns(self) -> frozenset[str]:
        """Columns of the rows that functions take by name; ALL_COLUMNS among them: all."""
        named = [name for runner in self._runners.values() for name in runner.columns]
        takes_rest = any(runner.takes_rest for runner in self._runners.values())
        return frozenset([*named, *[ALL_COLUMNS] * takes_rest])

    def count_failure(self, failure: Failure, prompt: Prompt) -> None:
        """Count the failure of an environment on a response, which has no score."""
        with self._lock:
            counts = self._of_environments.setdefault(
                failure.function, FailureCounts(failure.source)
            )
        counts.add(failure.reason, prompt.id)

    @property
    def num_threads(self) -> int:
        """Number of groups that can be scored at the same time."""
        return max((runner.num_threads for runner in self._runners.values()), default=1)

    def drain_warnings(self) -> list[str]:
        """Return failures since the last call: of cross-check, functions and environments."""
        with self._lock:
            environments = [*self._of_environments.values()]
        found = [runner.drain_warning() for runner in self._runners.values()]
        found += [
            counts.drain_warning("were left out or requested again") for counts in environments
        ]
        return [*self.verifier.drain_warnings(), *filter(None, found)]

    def close(self) -> None:
        """End all processes."""
        self._started.close()

    def _score(
        self,
        function: RewardFunction,
        prompt: Prompt,
        texts: Sequence[str],
        token_ids: Sequence[np.ndarray],
        returns: Sequence[float],
    ) -> Sequence[Score | None]:
        """Return one function's scores, as if it were the only function; None: it gives none."""
        if function.function == ENVIRONMENT:
            if len(returns) != len(texts):
                raise RewardError(
                    f'{prompt.data_source}: reward.functions has "{ENVIRONMENT}", and no entry of '
                    "rollout.environments plays these prompts: set data_sources in one of both"
                )
            return [Score(one, None, "") for one in returns]
        golds = [prompt.ground_truth] * len(texts)
        if function.function == "rule":
            return self.verifier.score_batch(texts, golds)
        if (rule := self._config.rule_of(function)) is not None:
            return [self._config.score(text, prompt.ground_truth, rule) for text in texts]
        return self._runners[function.label].score_group(prompt, texts, token_ids)


def _combined(functions: Sequence[RewardFunction], scores: Sequence[Score | None]) -> Score:
    """Combine the scores of one response; the first function that says decides what is correct."""
    given = [(f, one) for f, one in zip(functions, scores, strict=True) if one is not None]
    if not given:
        reason = "it returned None, and no other function scores the response"
        return Score(0.0, None, "", failure=Failure(functions[0].label, reason))
    parts: list[tuple[str, float]] = []
    for function, one in given:
        parts.append((function.label, one.reward))
        parts += ((f"{function.label}/{name}", value) for name, value in one.parts)
    texts = ((f"{f.label}/{name}", text) for f, one in given for name, text in one.texts)
    rewards = [function.weight * one.reward for function, one in given]
    verdicts = (
        one.correct if function.right_above is None else one.reward > function.right_above
        for function, one in given
    )
    symbolic = (one.symbolic_correct for _, one in given)
    return Score(
        math.fsum(rewards),
        next((verdict for verdict in verdicts if verdict is not None), None),
        next((one.answer for _, one in given if one.answer), ""),
        next((result for result in symbolic if result is not None), None),
        parts=tuple(parts),
        texts=tuple(texts),
        steps=_combined_steps(given, rewards),
        failure=next((one.failure for _, one in given if one.failure is not None), None),
    )


def _size(functions: Sequence[RewardFunction], scores: Sequence[Score | None]) -> float:
    """Return the sum of |weight x score|, by which the rounding of the reward is measured."""
    return math.fsum(
        abs(function.weight * one.reward)
        for function, one in zip(functions, scores, strict=True)
        if one is not None
    )


def _without_rounding(scores: list[Score], size: float) -> list[Score]:
    """Return the scores of a group with one reward if their rewards differ by rounding alone."""
    rewards = [score.reward for score in scores if score.failure is None]
    if not rewards or max(rewards) - min(rewards) > ROUNDING * size:
        return scores
    return [replace(score, reward=rewards[0]) for score in scores]


def _combined_steps(
    given: Sequence[tuple[RewardFunction, Score]], rewards: Sequence[float]
) -> Steps:
    """Return the weighted steps of all functions in order; empty if no function scores steps.

    The rewards of functions that score the whole response are added to its last step.
    """
    weighted = [
        (end, function.weight * value) for function, one in given for end, value in one.steps
    ]
    steps = sorted(weighted, key=lambda step: step[0])
    if not steps:
        return ()
    pairs = zip(rewards, given, strict=True)
    whole_rewards = [reward for reward, (_, one) in pairs if not one.steps]
    end, value = steps[-1]
    return (*steps[:-1], (end, math.fsum([value, *whole_rewards])))
