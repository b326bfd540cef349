"""One round of rollouts: generate groups and score each one while the others still run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from megadapo.data.prompts import Prompt
from megadapo.rewards.dapo_math import Score
from megadapo.rollout.requests import GroupRequest, GroupResponse, SamplingSettings

T = TypeVar("T")


class SupportsGenerate(Protocol):
    """What a round needs of the engines; `rollout.engines.Engines` is one."""

    def generate(
        self, groups: Sequence[GroupRequest], settings: SamplingSettings
    ) -> Iterator[GroupResponse]: ...


class SupportsScore(Protocol):
    """What a round needs of the verifier; rewards.verifier.Verifier is one."""

    def score_batch(
        self, responses: Sequence[str], ground_truths: Sequence[str]
    ) -> list[Score]: ...


@dataclass(frozen=True, kw_only=True)
class Question:
    """One prompt of a round, as the model and as the scorer see it."""

    key: int
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    """One per response."""


@dataclass
class EngineShare:
    """What one engine did in a round, or in several."""

    num_tokens: int = 0
    """Response tokens generated."""
    seconds: float = 0.0
    """From the start of a round until the engine's last group was there."""

    def add(self, other: EngineShare) -> None:
        self.num_tokens += other.num_tokens
        self.seconds += other.seconds


@dataclass(frozen=True, kw_only=True)
class RoundResult(Generic[T]):
    """What became of a round."""

    results: list[T]
    """One per question, in the order of their keys."""
    reward_seconds: float
    """Time spent scoring; most of it passes while responses are still generated."""
    engines: dict[int, EngineShare]
    """What each engine did, by its number; engines that were given nothing are left out."""


def run_round(
    engines: SupportsGenerate,
    verifier: SupportsScore,
    questions: Sequence[Question],
    settings: SamplingSettings,
    combine: Callable[[Question, GroupResponse, list[Score]], T],
) -> RoundResult[T]:
    """Ask every question once per seed, and combine responses and scores of each.

    `combine` makes the result of one question and is called in another thread.
    """
    by_key = {question.key: question for question in questions}
    requests = [
        GroupRequest(key=question.key, prompt_ids=question.prompt_ids, seeds=question.seeds)
        for question in questions
    ]
    scorer = _Scorer(verifier, by_key, combine)
    shares: dict[int, EngineShare] = defaultdict(EngineShare)
    start = time.perf_counter()
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scoring")
    try:
        futures = {}
        for response in engines.generate(requests, settings):
            share = shares[response.engine]
            share.num_tokens += sum(len(sample.token_ids) for sample in response.responses)
            share.seconds = time.perf_counter() - start
            futures[response.key] = executor.submit(scorer.score, response)
        results = [futures[key].result() for key in sorted(by_key)]
    finally:
        executor.shutdown(cancel_futures=True)
    return RoundResult(results=results, reward_seconds=scorer.seconds, engines=dict(shares))


class _Scorer(Generic[T]):
    """Scores groups one after the other and adds up the time."""

    def __init__(
        self,
        verifier: SupportsScore,
        questions: Mapping[int, Question],
        combine: Callable[[Question, GroupResponse, list[Score]], T],
    ) -> None:
        self.seconds = 0.0
        self._verifier = verifier
        self._questions = questions
        self._combine = combine

    def score(self, response: GroupResponse) -> T:
        start = time.perf_counter()
        question = self._questions[response.key]
        texts = [sample.text for sample in response.responses]
        scores = self._verifier.score_batch(texts, [question.prompt.ground_truth] * len(texts))
        self.seconds += time.perf_counter() - start
        return self._combine(question, response, scores)
