"""Accuracy on held-out problems: avg@k with its standard error.

An evaluation can have engines to itself, or take the slots that training leaves idle.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from megadapo.data.prompts import Prompt, render
from megadapo.errors import DataError
from megadapo.rollout.config import EvaluationConfig
from megadapo.rollout.journal.answer_log import AnswerLog, ProblemResult
from megadapo.rollout.sampling.scoring import (
    Answer,
    PromptRequest,
    ScoringPool,
    SupportsGenerate,
    SupportsScore,
)
from megadapo.rollout.tools import ToolsConfig
from megadapo.rollout.types import GroupResponse, SamplingSettings, response_seeds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PRIORITY = 1 << 48
"""Behind every group of training, whose priority is its place in asking order."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a policy scores on a set of problems."""

    accuracy: float
    """avg@k: share of correct responses."""
    standard_error: float
    """Of the accuracy, over problems: the spread of problems' accuracies / sqrt(num_problems);
    NaN for a single problem."""
    num_problems: int
    samples_per_problem: int
    response_length_mean: float
    """Mean length in tokens."""
    truncated_fraction: float
    """Share of responses that were cut at the length limit."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """What every evaluation asks: problems, each `samples_per_problem` times.

    Responses have the same seeds at every evaluation, and a problem's do not depend on the other
    problems nor on their order: two policies are compared on equal terms.
    """

    questions: tuple[PromptRequest, ...]
    """With negative keys; those of training are not."""
    settings: SamplingSettings
    samples_per_problem: int

    @classmethod
    def of(
        cls,
        prompts: Sequence[Prompt],
        config: EvaluationConfig,
        *,
        tokenizer: PreTrainedTokenizerBase,
        max_response_tokens: int,
        seed: int,
        tools: ToolsConfig | None = None,
    ) -> HeldOut:
        """Raises DataError where there are no problems.

        Args:
            tools: what responses may call; they never branch.
        """
        problems = list(prompts)[: config.max_problems]
        if not problems:
            raise DataError("there are no held-out problems to evaluate on")
        questions = tuple(
            PromptRequest(
                key=-number,
                prompt=prompt,
                prompt_ids=tuple(render(prompt, tokenizer)),
                seeds=response_seeds(config.samples_per_problem, seed, "evaluation", prompt.id),
                priority=PRIORITY,
            )
            for number, prompt in enumerate(problems, start=1)
        )
        settings = SamplingSettings(
            temperature=config.temperature,
            top_p=config.top_p,
            max_tokens=max_response_tokens,
            tools=tools or ToolsConfig(),
        )
        return cls(
            questions=questions, settings=settings, samples_per_problem=config.samples_per_problem
        )

    def digest(self, question: PromptRequest) -> str:
        """A name of all that an answer follows from but the weights and the scoring."""
        parts = (question.prompt_ids, question.seeds, question.prompt.ground_truth, self.settings)
        return hashlib.sha256(repr(parts).encode()).hexdigest()


class EvaluationUnderWay:
    """One evaluation, from its first question to its last answer. Use as a context manager.

    Questions are asked when the caller says so, and answers may reach it through somebody else
    who waits for the same engines.
    """

    def __init__(
        self,
        engines: SupportsGenerate,
        scorer: SupportsScore,
        held_out: HeldOut,
        answers: AnswerLog | None = None,
    ) -> None:
        """Begin with nothing asked.

        Args:
            answers: what an earlier process got of the same evaluation, and where answers are
                kept for a later one; None: neither.
        """
        self._engines = engines
        self.policy_version = engines.policy_version
        """Of the weights that are scored: those that the engines hold until it has finished."""
        self._held_out = held_out
        self._answers = answers
        self._inquiry = ScoringPool(engines, scorer)
        self._generating: set[int] = set()
        self._results: dict[int, ProblemResult] = {}
        known = {} if answers is None else answers.read()
        for question in held_out.questions:
            if (result := known.get(held_out.digest(question))) is not None:
                self._results[question.key] = result
        self._unasked = [q for q in held_out.questions if q.key not in self._results]
        self.num_answered_before = len(self._results)
        """Problems that an earlier process got the answers to."""

    def __enter__(self) -> Self:
        self._inquiry.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inquiry.__exit__(kind, error, trace)

    @property
    def generating(self) -> Collection[int]:
        """Keys of the groups that the engines have and have not handed back."""
        return self._generating

    @property
    def answered(self) -> bool:
        """Whether `finish` has nothing to wait for."""
        return not self._unasked and not self._inquiry.open

    def ask(self, capacity: int | None = None) -> None:
        """Ask the next questions, as many as fit into so many responses; all of them for None."""
        num_groups = None if capacity is None else capacity // self._held_out.samples_per_problem
        asked = self._unasked[:num_groups]
        if asked:
            del self._unasked[: len(asked)]
            self._generating.update(question.key for question in asked)
            self._inquiry.ask(asked, self._held_out.settings)

    def take(self, responses: Sequence[GroupResponse]) -> list[GroupResponse]:
        """Have its own responses scored, and return the others."""
        own = [response for response in responses if response.key in self._generating]
        others = [response for response in responses if response.key not in self._generating]
        self._generating.difference_update(response.key for response in own)
        self._inquiry.take(own)
        self._keep(self._inquiry.scored())
        return others

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take what the engines have finished, if nobody else uses them.

        Raises:
            InfraError: an engine failed.
        """
        self.take(self._engines.finished(timeout_s))

    def finish(self) -> Evaluation:
        """Ask what is not asked yet and wait for the rest; nobody else may use the engines.

        Raises:
            InfraError: an engine failed.
        """
        self.ask()
        while self._inquiry.open:
            self._keep(self._inquiry.answers())
        self._generating.clear()
        in_order = [self._results[question.key] for question in self._held_out.questions]
        return _summary(in_order, self._held_out.samples_per_problem)

    def _keep(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            result = _problem_result(answer)
            self._results[answer.question.key] = result
            if self._answers is not None:
                self._answers.append(self._held_out.digest(answer.question), result)


def _problem_result(answer: Answer) -> ProblemResult:
    samples = answer.response.responses
    return ProblemResult(
        accuracy=sum(score.correct for score in answer.scores) / len(answer.scores),
        num_tokens=sum(len(sample.token_ids) for sample in samples),
        num_truncated=sum(sample.finish_reason == "length" for sample in samples),
    )


def _summary(results: Sequence[ProblemResult], samples_per_problem: int) -> Evaluation:
    accuracies = np.array([result.accuracy for result in results])
    num_responses = len(results) * samples_per_problem
    spread = float(accuracies.std(ddof=1)) if len(results) > 1 else math.nan
    return Evaluation(
        accuracy=float(accuracies.mean()),
        standard_error=spread / math.sqrt(len(results)),
        num_problems=len(results),
        samples_per_problem=samples_per_problem,
        response_length_mean=sum(r.num_tokens for r in results) / num_responses,
        truncated_fraction=sum(r.num_truncated for r in results) / num_responses,
    )
