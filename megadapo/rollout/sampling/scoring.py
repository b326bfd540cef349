"""From open groups to scored ones: groups are scored while others are still generated."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from megadapo.data.group import (
    CUT_MESSAGES,
    FAILED,
    FAILURES,
    MIN_RESPONSES,
    Failure,
    Group,
    Response,
    Score,
)
from megadapo.data.prompts import Prompt
from megadapo.errors import RewardOutageError
from megadapo.rollout.types import (
    CAUSES,
    EngineActivity,
    EpisodeRequest,
    OpenGroup,
    StopReport,
)

SCORING_POLL_S = 0.005
"""Longest single wait for the engines while groups are being scored."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pauses between attempts to score a group while a reward function has an outage; each is twice the
one before."""
OUTAGE_S = 1800.0
"""Longest outage of a reward function that a group waits for."""
MAX_REPEATS = 2
"""Number of times that a group asks its environment again if too few of its responses are left."""

logger = logging.getLogger(__name__)


class SupportsGenerate(Protocol):
    """The methods of the engines that sampling calls; `rollout.pool.engines.Engines` has them."""

    @property
    def policy_version(self) -> int:
        """Policy version of the engines' weights."""

    @property
    def capacity(self) -> int:
        """Number of responses to submit so that no slot stays empty and few responses wait."""

    @property
    def num_in_flight(self) -> int:
        """Number of groups submitted and not returned."""

    def submit(self, groups: Sequence[OpenGroup]) -> None:
        """Send each group to the engine with the least work; return at once."""

    def finished(self, timeout_s: float | None = None) -> list[OpenGroup]:
        """Wait until a group has finished and return all finished ones; empty after the timeout."""

    def stop(self, keys: Collection[int] | None = None, *, keep: bool) -> StopReport:
        """Stop the groups with these keys, or all; `keep`: return their responses so far."""

    def activity(self) -> list[EngineActivity]:
        """Return the activity of each engine since the last call."""


class SupportsScore(Protocol):
    """The methods of the rewards that sampling calls; `rewards.scorer.Scorer` has them."""

    @property
    def num_threads(self) -> int:
        """Number of groups to score at the same time."""

    def score_group(
        self,
        prompt: Prompt,
        texts: Sequence[str],
        token_ids: Sequence[np.ndarray],
        returns: Sequence[float] = (),
    ) -> list[Score]:
        """Score the responses to one prompt; `returns`: what each earned in its environment.

        Raises:
            RewardOutageError: the group should be scored again later.
        """

    def count_failure(self, failure: Failure, prompt: Prompt) -> None:
        """Count the failure of an environment on a response, which has no score."""


class ScoringPool:
    """The open groups; finished ones are scored in threads and returned when scored."""

    def __init__(
        self,
        engines: SupportsGenerate,
        scorer: SupportsScore,
        prompt_of: Callable[[int], Prompt],
        new_executor: Callable[[], Executor] | None = None,
    ) -> None:
        """Start without groups.

        Args:
            prompt_of: returns the prompt of a group's key.
            new_executor: returns what runs the scoring; by default a thread pool of the scorer's
                size.
        """
        self._reward_seconds = 0.0
        self._engines = engines
        self._scorer = scorer
        self._prompt_of = prompt_of
        new_pool = partial(ThreadPoolExecutor, scorer.num_threads, "scoring")
        self._executor: Executor = (new_executor or new_pool)()
        self._lock, self._closing = threading.Lock(), threading.Event()
        self.open: set[int] = set()
        """Keys of the groups that have not been returned."""
        self._stopped: list[OpenGroup] = []
        self._scoring: dict[Future[Group], OpenGroup] = {}
        self._wanted: set[int] = set()
        """Identities of the groups whose scores are wanted; read by the scoring threads."""
        self._num_repeats: Counter[int] = Counter()
        """Number of repeats by key of an open group."""
        self._failures: Counter[str] = Counter()

    def close(self) -> None:
        """End all scoring, also of groups that wait for the end of an outage."""
        self._closing.set()
        self._executor.shutdown(cancel_futures=True)

    @property
    def generating(self) -> Collection[int]:
        """Keys of the groups that the engines have not returned."""
        return self.open.difference(group.key for group in self._scoring.values())

    def take_counts(self) -> dict[str, float]:
        """Return the metrics since the last call: time of scoring, failures of environments.

        Most of the time passes while responses are still generated.
        """
        with self._lock:
            seconds, self._reward_seconds = self._reward_seconds, 0.0
        failures, self._failures = self._failures, Counter()
        named = {name: float(number) for name, number in sorted(failures.items())}
        return {"time/reward_s": seconds, **named}

    def submit(self, groups: Sequence[OpenGroup]) -> None:
        """Send groups to the engines."""
        self.open.update(group.key for group in groups)
        self._engines.submit(groups)

    def wait(self, timeout_s: float | None = None) -> list[Group]:
        """Wait until groups are scored or the engines have capacity; return all scored groups.

        Args:
            timeout_s: longest wait; None: no limit.
        """
        if self._engines.num_in_flight:
            finished = self._engines.finished(SCORING_POLL_S if self._scoring else timeout_s)
            self._stopped += [group for group in finished if group.is_unfinished]
            self.score([group for group in finished if not group.is_unfinished])
        elif self._scoring:
            wait(self._scoring, timeout_s, return_when=FIRST_COMPLETED)
        return self.scored()

    def score(self, groups: Sequence[OpenGroup]) -> None:
        """Start to score open groups that the engines have returned."""
        for group in groups:
            self._wanted.add(id(group))
            self._scoring[self._executor.submit(self._score, group)] = group

    def drop(self, keys: Collection[int] | None = None) -> int:
        """Cancel open groups, by default all, and return the number of tokens spent on them."""
        report = self._engines.stop(keys, keep=False)
        self._forget(set(self.open) if keys is None else keys)
        return report.num_tokens

    def stop(self) -> list[OpenGroup]:
        """Stop all open groups, and return them with their responses so far."""
        report = self._engines.stop(keep=True)
        # groups being scored are returned without scores, and scored again later
        unscored = [*self._scoring.values(), *self.take_stopped()]
        self._forget(set(self.open))
        return [*report.unfinished, *unscored]

    def take_stopped(self) -> list[OpenGroup]:
        """Return the groups that engines have stopped at their `stop_at_tokens`."""
        stopped, self._stopped = self._stopped, []
        self.open.difference_update(group.key for group in stopped)
        return stopped

    def _forget(self, keys: Collection[int]) -> None:
        """Ignore the scores of groups; the same keys may be submitted again."""
        self.open.difference_update(keys)
        for future, group in list(self._scoring.items()):
            if group.key in keys:
                future.cancel()
                self._wanted.discard(id(self._scoring.pop(future)))
        for key in keys:
            del self._num_repeats[key]

    def scored(self) -> list[Group]:
        """Return the scored groups without waiting; some continue after failures instead."""
        groups: list[Group] = []
        repeated: list[OpenGroup] = []
        for future in [future for future in self._scoring if future.done()]:
            answered = self._scoring.pop(future)
            self._wanted.discard(id(answered))
            group = future.result()
            self._count_failures(answered, group.prompt)
            if self._must_repeat(answered, len(group.responses)):
                self._num_repeats[answered.key] += 1
                repeated.append(answered.repeat_failures())
            else:
                groups.append(group)
        if repeated:
            self._engines.submit(repeated)
        self._forget([group.prompt_index for group in groups])
        return groups

    def _count_failures(self, group: OpenGroup, prompt: Prompt) -> None:
        for response in group.responses:
            if response.failure is not None:
                self._scorer.count_failure(response.failure, prompt)
                kind = CAUSES.get(response.failure.reason.partition(":")[0], "exception")
                self._failures[f"{response.failure.function}/{FAILURES}/{kind}"] += 1

    def _must_repeat(self, group: OpenGroup, num_left: int) -> bool:
        """Return whether a group asks its environment again, as it has too few responses left."""
        if group.episode is None or group.episode.config.recovery == "once":
            return False
        has_failed = any(response.failure is not None for response in group.responses)
        too_few = num_left < min(MIN_RESPONSES, len(group.seeds))
        return has_failed and too_few and self._num_repeats[group.key] < MAX_REPEATS

    def _score(self, group: OpenGroup) -> Group:
        start = time.perf_counter()
        prompt, responses = self._prompt_of(group.key), group.responses
        assert not group.is_unfinished, f"group {group.key} has an unfinished response"
        answered = [response for response in responses if response.failure is None]
        scored = iter(self._scores(group, prompt, answered) if answered else [])
        # a response whose environment failed has no score
        scores = [
            _with_parts(next(scored), response, group.episode)
            if response.failure is None
            else Score(0.0, None, "", failure=response.failure)
            for response in responses
        ]
        with self._lock:
            self._reward_seconds += time.perf_counter() - start
        return Group(
            prompt_index=group.key,
            prompt=prompt,
            prompt_ids=group.prompt_ids,
            responses=responses,
            scores=tuple(scores),
            seconds=group.seconds,
        ).without_failures()

    def _scores(
        self, group: OpenGroup, prompt: Prompt, responses: Sequence[Response]
    ) -> list[Score]:
        """Score a group, again and again while a function has an outage and the group is open."""
        pause_s, until = FIRST_PAUSE_S, time.monotonic() + OUTAGE_S
        texts, token_ids = zip(
            *((response.text, response.token_ids) for response in responses), strict=True
        )
        of_episodes = (
            [] if group.episode is None else [[response.episode_return for response in responses]]
        )
        while True:
            try:
                return self._scorer.score_group(prompt, texts, token_ids, *of_episodes)
            except RewardOutageError as error:
                if time.monotonic() + pause_s > until or id(group) not in self._wanted:
                    raise
                logger.warning("%s; trying again in %g s", error, pause_s)
                if self._closing.wait(pause_s):
                    raise
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _with_parts(score: Score, response: Response, episode: EpisodeRequest | None) -> Score:
    """Return a score with what the response's environment counted, if it had one."""
    if episode is None:
        return score
    counted = {
        "return": response.episode_return,
        "turns": float(len(response.actions)),
        "seconds": math.fsum(turn.seconds for turn in response.turns),
        "out_of_turns": float(response.finish_reason == "max_turns"),
        CUT_MESSAGES: 0.0,
        FAILED: 0.0,
        **response.metrics,
    }
    parts = ((f"{episode.area}/{name}", value) for name, value in counted.items())
    return replace(score, parts=(*score.parts, *parts))
