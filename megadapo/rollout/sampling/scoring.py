"""From questions to scored answers: groups are scored while others still run."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from megadapo.data.prompts import Prompt
from megadapo.rewards.dapo_math import Score
from megadapo.rollout.engine.activity import EngineActivity
from megadapo.rollout.types import (
    GroupRequest,
    GroupResponse,
    Response,
    SamplingSettings,
    StopReport,
)

SCORING_POLL_S = 0.005
"""How long to wait for the engines at a time while scores are on their way."""


class SupportsGenerate(Protocol):
    """What sampling needs of the engines; `rollout.engines.Engines` is one."""

    @property
    def policy_version(self) -> int:
        """Of the weights the engines hold."""
        ...

    @property
    def capacity(self) -> int:
        """Responses that may be submitted so that no slot is left empty and few have to wait."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Groups submitted and not handed back."""
        ...

    def submit(self, groups: Sequence[GroupRequest]) -> None:
        """Give each group, whole, to the engine with the least to do; returns at once."""
        ...

    def finished(self, timeout_s: float | None = None) -> list[GroupResponse]:
        """Wait until a group has finished and return all that have; nothing after the timeout."""
        ...

    def stop(self, keys: Collection[int] | None = None, *, keep: bool) -> StopReport:
        """End the groups with these keys, or all; `keep`: hand over what they have so far."""
        ...

    def activity(self) -> list[EngineActivity]:
        """What each engine did since this was last asked."""
        ...


class SupportsScore(Protocol):
    """What sampling needs of the rewards; rewards.scorer.Scorer is one."""

    @property
    def num_threads(self) -> int:
        """Groups that are worth being scored at the same time."""
        ...

    def score_group(
        self, prompt: Prompt, texts: Sequence[str], token_ids: Sequence[np.ndarray]
    ) -> list[Score]:
        """Score the responses to one prompt."""
        ...


@dataclass(frozen=True, kw_only=True)
class PromptRequest:
    """One prompt, as the model and as the scorer see it."""

    key: int
    """Names the question among those that are open."""
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    """One per response."""
    priority: int = 0
    """An engine with too few slots takes the lowest first."""
    begun: tuple[Response, ...] = ()
    """What an earlier request for the same responses had got when it was stopped."""

    def request(self, settings: SamplingSettings) -> GroupRequest:
        return GroupRequest(
            key=self.key,
            prompt_ids=self.prompt_ids,
            seeds=self.seeds,
            settings=settings,
            priority=self.priority,
            begun=self.begun,
        )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A question with all of its responses and their scores."""

    question: PromptRequest
    response: GroupResponse
    scores: tuple[Score, ...]


class ScoringPool:
    """Open questions; answers come back scored, in the order in which they are ready.

    Use as a context manager: on leaving, nothing is scored any more.
    """

    def __init__(
        self, engines: SupportsGenerate, scorer: SupportsScore, executor: Executor | None = None
    ) -> None:
        """`executor`: where groups are scored; by default the scorer's number of threads."""
        self.reward_seconds = 0.0
        """Time spent scoring; most of it passes while responses are still generated."""
        self._engines = engines
        self._scorer = scorer
        self._executor = executor or ThreadPoolExecutor(scorer.num_threads, "scoring")
        self._lock = threading.Lock()
        self._open: dict[int, PromptRequest] = {}
        self._scoring: dict[Future[Answer], GroupResponse] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._executor.shutdown(cancel_futures=True)

    @property
    def open(self) -> Collection[PromptRequest]:
        """The questions without an answer."""
        return self._open.values()

    def ask(self, questions: Sequence[PromptRequest], settings: SamplingSettings) -> None:
        """Ask every question once per seed."""
        self._open.update((question.key, question) for question in questions)
        self._engines.submit([question.request(settings) for question in questions])

    def answers(self) -> list[Answer]:
        """Wait for answers; there may be none where the engines have room for more questions.

        Raises:
            InfraError: an engine failed.
        """
        if self._engines.num_in_flight:
            timeout_s = SCORING_POLL_S if self._scoring else None
            self.take(self._engines.finished(timeout_s))
        elif self._scoring:
            wait(self._scoring, return_when=FIRST_COMPLETED)
        return self.scored()

    def take(self, responses: Sequence[GroupResponse]) -> None:
        """Have responses to open questions scored."""
        for response in responses:
            question = self._open[response.key]
            self._scoring[self._executor.submit(self._score, question, response)] = response

    def drop(self, keys: Collection[int]) -> int:
        """Take questions back whose answers nobody needs; return the tokens spent on them."""
        report = self._engines.stop(keys, keep=False)
        for key in keys:
            del self._open[key]
        return report.num_tokens

    def stop(self, *, keep: bool) -> StopReport:
        """End all that has no answer yet; `keep`: the report has what there is of it."""
        report = self._engines.stop(keep=keep)
        # nobody waits for their scores; they are scored when they are asked for again
        unscored = [one for one in self._scoring.values() if one.key in self._open]
        self._open.clear()
        return replace(report, unfinished=(*report.unfinished, *unscored)) if keep else report

    def scored(self) -> list[Answer]:
        """Return the answers that are ready, without waiting."""
        done = [future for future in self._scoring if future.done()]
        for future in done:
            del self._scoring[future]
        answers = [future.result() for future in done]
        # what was dropped while it was scored is not an answer any more
        return [a for a in answers if self._open.pop(a.question.key, None) is not None]

    def _score(self, question: PromptRequest, response: GroupResponse) -> Answer:
        start = time.perf_counter()
        texts = [sample.text for sample in response.responses]
        token_ids = [sample.token_ids for sample in response.responses]
        scores = self._scorer.score_group(question.prompt, texts, token_ids)
        with self._lock:
            self.reward_seconds += time.perf_counter() - start
        return Answer(question=question, response=response, scores=tuple(scores))
