"""The numbers of an evaluation: avg@k with its standard error, pass@k and cons@k, over sets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megadapo.data.group import NO_ANSWER
from megadapo.rollout.journal.journal import ProblemResult


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of a policy on a set of problems."""

    accuracy: float
    """avg@k: share of correct responses."""
    standard_error: float
    """Standard deviation of the problems' accuracies / sqrt(num_problems); NaN for one problem."""
    pass_at: dict[int, float]
    """pass@k for k = 2, 4, ... and all samples: probability that one of k responses is correct."""
    consensus: float | None
    """cons@k: share of problems whose most frequent answer is correct; None without answers."""
    num_problems: int
    samples_per_problem: int
    response_length_mean: float
    """Mean length in tokens."""
    truncated_fraction: float
    """Share of responses cut at the length limit."""
    sets: Mapping[str, Evaluation] = field(default_factory=dict)
    """Result of each named set; the values above are then their means, num_problems the sum."""


def summary(results: Sequence[ProblemResult], samples_per_problem: int) -> Evaluation:
    """Return the result on one set of problems."""
    accuracies = np.array([result.num_correct / result.num_scored for result in results])
    known = [result.consensus for result in results if result.consensus is not None]
    sizes = [2**n for n in range(1, samples_per_problem.bit_length())]
    num_responses = len(results) * samples_per_problem
    spread = float(accuracies.std(ddof=1)) if len(results) > 1 else math.nan
    return Evaluation(
        accuracy=float(accuracies.mean()),
        standard_error=spread / math.sqrt(len(results)),
        pass_at={
            k: math.fsum(pass_at_k(r.num_correct, r.num_scored, k) for r in results) / len(results)
            for k in sorted({*sizes, samples_per_problem})
        },
        consensus=math.fsum(known) / len(known) if known else None,
        num_problems=len(results),
        samples_per_problem=samples_per_problem,
        response_length_mean=sum(r.num_tokens for r in results) / num_responses,
        truncated_fraction=sum(r.num_truncated for r in results) / num_responses,
    )


def pass_at_k(num_correct: int, num_samples: int, k: int) -> float:
    """Return the unbiased estimate that one of `k` responses is correct.

    Chen et al., "Evaluating Large Language Models Trained on Code" (2021), equation 1. With fewer
    than `k` samples it is of all of them.
    """
    k = min(k, num_samples)
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def consensus(answers: Sequence[str], correct: Sequence[bool]) -> float | None:
    """Return whether the most frequent answer is correct: 1 or 0, and a share for a tie.

    A response without an answer has no vote; if no response has an answer, the result is 0. It is
    None if the reward function extracts no answers.

    Args:
        answers: as they were compared.
        correct: of each; the same answer may be correct in a part of the responses only.
    """
    if not any(answers):
        return None
    votes: dict[str, list[bool]] = {}
    for answer, is_correct in zip(answers, correct, strict=True):
        if answer not in ("", NO_ANSWER):
            votes.setdefault(answer, []).append(is_correct)
    most = max(map(len, votes.values()), default=0)
    leading = [own for own in votes.values() if len(own) == most]
    return sum(map(sum, leading)) / max(1, most * len(leading))


def mean_of_sets(sets: Mapping[str, Evaluation]) -> Evaluation:
    """Return the mean over sets, each with the same weight."""

    def mean(value: Callable[[Evaluation], float]) -> float:
        return math.fsum(map(value, sets.values())) / len(sets)

    first, *_ = sets.values()
    known = [one.consensus for one in sets.values() if one.consensus is not None]
    return Evaluation(
        accuracy=mean(lambda one: one.accuracy),
        standard_error=math.hypot(*(one.standard_error for one in sets.values())) / len(sets),
        pass_at={
            k: math.fsum(one.pass_at[k] for one in sets.values()) / len(sets) for k in first.pass_at
        },
        consensus=math.fsum(known) / len(known) if known else None,
        num_problems=sum(one.num_problems for one in sets.values()),
        samples_per_problem=first.samples_per_problem,
        response_length_mean=mean(lambda one: one.response_length_mean),
        truncated_fraction=mean(lambda one: one.truncated_fraction),
        sets=sets,
    )
