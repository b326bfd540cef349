"""From open groups to scored ones: groups are scored while others are still generated."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Protocol, Self

import numpy as np

from megadapo.data.group import Group, Score
from megadapo.data.prompts import Prompt
from megadapo.errors import RewardOutageError
from megadapo.rollout.engine.activity import EngineActivity
from megadapo.rollout.types import OpenGroup, StopReport

SCORING_POLL_S = 0.005
"""Longest single wait for the engines while groups are being scored."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pauses between attempts to score a group while a reward function has an outage; each is twice the
one before."""
OUTAGE_S = 1800.0
"""Longest outage of a reward function that a group waits for."""

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
        self, prompt: Prompt, texts: Sequence[str], token_ids: Sequence[np.ndarray]
    ) -> list[Score]:
        """Score the responses to one prompt.

        Raises:
            RewardOutageError: the group should be scored again later.
        """


class ScoringPool:
    """The open groups; finished ones are scored in threads and returned when scored.

    Use it as a context manager: leaving it ends all scoring.
    """

    def __init__(
        self,
        engines: SupportsGenerate,
        scorer: SupportsScore,
        prompt_of: Callable[[int], Prompt],
        executor: Executor | None = None,
    ) -> None:
        """Start without groups.

        Args:
            prompt_of: returns the prompt of a group's key.
            executor: runs the scoring; by default a thread pool of the scorer's size.
        """
        self.reward_seconds = 0.0
        """Time spent on scoring, most of it while responses are still generated."""
        self._engines = engines
        self._scorer = scorer
        self._prompt_of = prompt_of
        self._executor = executor or ThreadPoolExecutor(scorer.num_threads, "scoring")
        self._lock, self._closing = threading.Lock(), threading.Event()
        self.open: set[int] = set()
        """Keys of the groups that have not been returned."""
        self._scoring: dict[Future[Group], OpenGroup] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        self._executor.shutdown(cancel_futures=True)

    def submit(self, groups: Sequence[OpenGroup]) -> None:
        """Send groups to the engines."""
        self.open.update(group.key for group in groups)
        self._engines.submit(groups)

    def wait(self) -> list[Group]:
        """Wait until groups are scored or the engines have capacity; return all scored groups.

        Raises:
            InfraError: an engine failed, or the outage of a reward function is too long.
        """
        if self._engines.num_in_flight:
            timeout_s = SCORING_POLL_S if self._scoring else None
            self.score(self._engines.finished(timeout_s))
        elif self._scoring:
            wait(self._scoring, return_when=FIRST_COMPLETED)
        return self.scored()

    def score(self, groups: Sequence[OpenGroup]) -> None:
        """Start to score open groups that the engines have returned."""
        for group in groups:
            self._scoring[self._executor.submit(self._score, group)] = group

    def drop(self, keys: Collection[int]) -> int:
        """Cancel groups, and return the number of tokens spent on them."""
        report = self._engines.stop(keys, keep=False)
        self.open.difference_update(keys)
        return report.num_tokens

    def stop(self, *, keep: bool) -> StopReport:
        """Cancel all open groups; `keep`: report their responses so far."""
        report = self._engines.stop(keep=keep)
        # groups being scored are kept without scores; the next step scores them again
        unscored = [one for one in self._scoring.values() if one.key in self.open]
        self.open.clear()
        return replace(report, unfinished=(*report.unfinished, *unscored)) if keep else report

    def scored(self) -> list[Group]:
        """Return the scored groups without waiting."""
        done = [future for future in self._scoring if future.done()]
        for future in done:
            del self._scoring[future]
        groups = [future.result() for future in done]
        # a group that was dropped while it was scored is not open any more
        groups = [group for group in groups if group.prompt_index in self.open]
        self.open.difference_update(group.prompt_index for group in groups)
        return groups

    def _score(self, group: OpenGroup) -> Group:
        start = time.perf_counter()
        prompt, responses = self._prompt_of(group.key), group.responses
        if any(one.finish_reason == "unfinished" for one in responses):
            raise ValueError(f"group {group.key} has an unfinished response")
        texts = [one.text for one in responses]
        scores = self._scores(group.key, prompt, texts, [one.token_ids for one in responses])
        with self._lock:
            self.reward_seconds += time.perf_counter() - start
        return Group(
            prompt_index=group.key,
            prompt=prompt,
            prompt_ids=group.prompt_ids,
            responses=responses,
            scores=tuple(scores),
            seconds=group.seconds,
        ).without_failures()

    def _scores(
        self, key: int, prompt: Prompt, texts: Sequence[str], token_ids: Sequence[np.ndarray]
    ) -> list[Score]:
        """Score a group, again and again while a function has an outage and the group is open."""
        pause_s, until = FIRST_PAUSE_S, time.monotonic() + OUTAGE_S
        while True:
            try:
                return self._scorer.score_group(prompt, texts, token_ids)
            except RewardOutageError as error:
                if time.monotonic() + pause_s > until or key not in self.open:
                    raise
                logger.warning("%s; trying again in %g s", error, pause_s)
                if self._closing.wait(pause_s):
                    raise
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
