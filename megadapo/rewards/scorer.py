"""Scores every response: the reward is the weighted sum of the scores of reward.functions."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from megadapo.algorithm.groups import Steps
from megadapo.data.group import Failure, Score
from megadapo.data.prompts import Prompt
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

    def check_data_sources(self, prompts: Iterable[Prompt]) -> None:
        """Check that each function with data_sources has prompts; warn of those without any.

        Raises:
            ConfigError: a function would never be called.
        """
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
        return [_combined(applying, row) for row in zip(*columns, strict=True)]

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
    ) -> list[Score]:
        """Return one function's scores, as if it were the only function."""
        if function.function == ENVIRONMENT:
            if len(returns) != len(texts):
                raise RewardError(
                    f'{prompt.data_source}: reward.functions has "{ENVIRONMENT}", and no entry of '
                    "rollout.environments plays these prompts: set data_sources in one of both"
                )
            return [Score(one, one > function.right_above, "") for one in returns]
        golds = [prompt.ground_truth] * len(texts)
        if function.function == "rule":
            return self.verifier.score_batch(texts, golds)
        if (rule := self._config.rule_of(function)) is not None:
            return [self._config.score(text, prompt.ground_truth, rule) for text in texts]
        found: list[Score] = []
        for one in self._runners[function.label].score_group(prompt, texts, token_ids):
            failure = None
            if one.failure is not None and function.reaction(is_outage=one.is_outage) != "score":
                failure = Failure(function.label, one.failure)
            given = Score(one.score, one.correct, "", parts=one.parts, steps=one.steps)
            found.append(replace(given, failure=failure))
        return found


def _combined(functions: Sequence[RewardFunction], scores: Sequence[Score]) -> Score:
    """Combine the scores of one response; the first function decides whether it is right."""
    parts: list[tuple[str, float]] = []
    for function, one in zip(functions, scores, strict=True):
        parts.append((function.label, one.reward))
        parts += ((f"{function.label}/{name}", value) for name, value in one.parts)
    rewards = [f.weight * one.reward for f, one in zip(functions, scores, strict=True)]
    answer = next((score.answer for score in scores if score.answer), "")
    return replace(
        scores[0],
        reward=math.fsum(rewards),
        answer=answer,
        parts=tuple(parts),
        steps=_combined_steps(functions, scores, rewards),
        failure=next((score.failure for score in scores if score.failure is not None), None),
    )


def _combined_steps(
    functions: Sequence[RewardFunction], scores: Sequence[Score], rewards: Sequence[float]
) -> Steps:
    """Return the weighted steps of all functions in order; empty if no function scores steps.

    The rewards of functions that score the whole response are added to its last step.
    """
    steps = sorted(
        (
            (end, function.weight * value)
            for function, one in zip(functions, scores, strict=True)
            for end, value in one.steps
        ),
        key=lambda step: step[0],
    )
    if not steps:
        return ()
    whole_rewards = [reward for reward, one in zip(rewards, scores, strict=True) if not one.steps]
    end, value = steps[-1]
    return (*steps[:-1], (end, math.fsum([value, *whole_rewards])))
