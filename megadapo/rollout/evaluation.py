"""Accuracy on held-out problems: avg@k with its standard error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megadapo.data.prompts import Prompt, render
from megadapo.errors import DataError
from megadapo.rollout.config import EvaluationConfig
from megadapo.rollout.requests import SamplingSettings, response_seeds
from megadapo.rollout.scoring import (
    Answer,
    Inquiry,
    Question,
    SupportsGenerate,
    SupportsScore,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
class _ProblemResult:
    accuracy: float
    num_tokens: int
    num_truncated: int


def evaluate(
    engines: SupportsGenerate,
    prompts: Sequence[Prompt],
    verifier: SupportsScore,
    config: EvaluationConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_response_tokens: int,
    seed: int,
) -> Evaluation:
    """Ask each problem `samples_per_problem` times and score the responses.

    Responses have the same seeds at every evaluation, and a problem's do not depend on the other
    problems nor on their order: two policies are compared on equal terms.

    Raises:
        DataError: there are no problems.
        InfraError: an engine failed.
    """
    problems = list(prompts)[: config.max_problems]
    if not problems:
        raise DataError("there are no held-out problems to evaluate on")
    settings = SamplingSettings(
        temperature=config.temperature, top_p=config.top_p, max_tokens=max_response_tokens
    )
    questions = [
        Question(
            key=key,
            prompt=prompt,
            prompt_ids=tuple(render(prompt, tokenizer)),
            seeds=response_seeds(config.samples_per_problem, seed, "evaluation", prompt.id),
        )
        for key, prompt in enumerate(problems)
    ]
    results: dict[int, _ProblemResult] = {}
    with Inquiry(engines, verifier) as inquiry:
        inquiry.ask(questions, settings)
        while inquiry.open:
            for answer in inquiry.answers():
                results[answer.question.key] = _problem_result(answer)
    in_order = [results[question.key] for question in questions]
    return _summary(in_order, config.samples_per_problem)


def _problem_result(answer: Answer) -> _ProblemResult:
    samples = answer.response.responses
    return _ProblemResult(
        accuracy=sum(score.correct for score in answer.scores) / len(answer.scores),
        num_tokens=sum(len(sample.token_ids) for sample in samples),
        num_truncated=sum(sample.finish_reason == "length" for sample in samples),
    )


def _summary(results: Sequence[_ProblemResult], samples_per_problem: int) -> Evaluation:
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
