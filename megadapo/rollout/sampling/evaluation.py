"""Accuracy on held-out problems: avg@k with its standard error, pass@k and cons@k.

An evaluation uses engines of its own, or the slots that training leaves idle.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import numpy as np

from megadapo.data.group import NO_ANSWER, Group, Score
from megadapo.data.prompts import Prompt
from megadapo.errors import DataError, InfraError
from megadapo.rollout.config import EvaluationConfig
from megadapo.rollout.episodes.requests import EpisodeRequests
from megadapo.rollout.journal.journal import Journal, group_digest
from megadapo.rollout.sampling.scoring import ScoringPool, SupportsGenerate, SupportsScore
from megadapo.rollout.types import (
    EngineActivity,
    OpenGroup,
    SamplingSettings,
    StopReport,
    continued_seed,
    response_seeds,
)
from megadapo.tokens.stops import stop_ids

if TYPE_CHECKING:
    from megadapo.rollout.pool.engines import Engines

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of a policy on a set of problems."""

    accuracy: float | None
    """avg@k: share of correct responses; None if no reward function says what is correct."""
    score: float
    """Mean reward of a response."""
    standard_error: float
    """Standard deviation of the problems' accuracies, or else scores / sqrt(num_problems); NaN for
    one problem."""
    pass_at: dict[int, float]
    """pass@k for k = 2, 4, ... and all samples: probability that one of k responses is correct;
    empty without accuracy."""
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


def summary(groups: Sequence[Group], samples_per_problem: int) -> Evaluation:
    """Return the result on one set of problems, each with its group of scored responses."""
    scores = np.array([math.fsum(group.rewards) / len(group.scores) for group in groups])
    verdicts = [group.correct for group in groups]
    correct = [(sum(one), len(one)) for one in verdicts if one is not None]
    has_accuracy = len(correct) == len(groups)
    means = np.array([right / of for right, of in correct]) if has_accuracy else scores
    votes = [consensus(group.scores) for group in groups]
    known = [vote for vote in votes if vote is not None]
    # responses without a score count as the mean of the others
    scales = [samples_per_problem / len(group.responses) for group in groups]
    lengths = [round(n * sum(one.lengths)) for n, one in zip(scales, groups, strict=True)]
    truncated = [round(n * sum(one.truncated)) for n, one in zip(scales, groups, strict=True)]
    sizes = [2**n for n in range(1, samples_per_problem.bit_length())]
    num_responses = len(groups) * samples_per_problem
    spread = float(means.std(ddof=1)) if len(groups) > 1 else math.nan
    return Evaluation(
        accuracy=float(means.mean()) if has_accuracy else None,
        score=float(scores.mean()),
        standard_error=spread / math.sqrt(len(groups)),
        pass_at={
            k: math.fsum(pass_at_k(right, of, k) for right, of in correct) / len(correct)
            for k in sorted({*sizes, samples_per_problem} if has_accuracy else ())
        },
        consensus=math.fsum(known) / len(known) if known else None,
        num_problems=len(groups),
        samples_per_problem=samples_per_problem,
        response_length_mean=sum(lengths) / num_responses,
        truncated_fraction=sum(truncated) / num_responses,
    )


def pass_at_k(num_correct: int, num_samples: int, k: int) -> float:
    """Return the unbiased estimate that one of `k` responses is correct.

    Chen et al., "Evaluating Large Language Models Trained on Code" (2021), equation 1. With fewer
    than `k` samples it is of all of them.
    """
    k = min(k, num_samples)
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def consensus(scores: Sequence[Score]) -> float | None:
    """Return whether the most frequent answer is correct: 1 or 0, and a share for a tie.

    Answers that the reward function or the symbolic comparison accepts are one answer, and others
    are compared as the rule spells them. A response without an answer has no vote; if no response
    has an answer, the result is 0. It is None if the reward function extracts no answers, or does
    not say what is correct.
    """
    if not any(score.answer for score in scores) or any(one.correct is None for one in scores):
        return None
    gold = {score.answer for score in scores if score.correct or score.symbolic_correct}
    votes: dict[str, list[bool]] = {}
    for score in scores:
        if score.answer not in ("", NO_ANSWER):
            # the same answer may be correct in a part of the responses only
            vote = "" if score.answer in gold else score.answer
            votes.setdefault(vote, []).append(bool(score.correct))
    most = max(map(len, votes.values()), default=0)
    leading = [own for own in votes.values() if len(own) == most]
    return sum(map(sum, leading)) / max(1, most * len(leading))


def mean_of_sets(sets: Mapping[str, Evaluation]) -> Evaluation:
    """Return the mean over sets, each with the same weight."""

    def mean(value: Callable[[Evaluation], float]) -> float:
        return math.fsum(map(value, sets.values())) / len(sets)

    first, *_ = sets.values()
    has_accuracy = all(one.accuracy is not None for one in sets.values())
    known = [one.consensus for one in sets.values() if one.consensus is not None]
    return Evaluation(
        accuracy=mean(lambda one: one.accuracy or 0.0) if has_accuracy else None,
        score=mean(lambda one: one.score),
        standard_error=math.hypot(*(one.standard_error for one in sets.values())) / len(sets),
        pass_at={
            k: math.fsum(one.pass_at[k] for one in sets.values()) / len(sets)
            for k in (first.pass_at if has_accuracy else ())
        },
        consensus=math.fsum(known) / len(known) if known else None,
        num_problems=sum(one.num_problems for one in sets.values()),
        samples_per_problem=first.samples_per_problem,
        response_length_mean=mean(lambda one: one.response_length_mean),
        truncated_fraction=mean(lambda one: one.truncated_fraction),
        sets=sets,
    )


TELL_S = 5.0
"""Seconds between two lines about an evaluation that is waited for."""
EVALUATION_PRIORITY = 1 << 48
"""A priority after every training group, whose priority is its prompt index."""
MAX_REPLACED = 10
"""Number of times that all episodes of a problem are replaced by others, one for each restart."""


@dataclass(frozen=True, kw_only=True)
class HeldOutRequests:
    """The requests of every evaluation: problems with `samples_per_problem` responses each.

    Responses have the same seeds in every evaluation, independent of the other problems and their
    order, so two policies are compared on equal terms.
    """

    prompts: tuple[Prompt, ...]
    set_names: tuple[str, ...]
    """Held-out set of each prompt; empty for a set without a name."""
    requests: tuple[OpenGroup, ...]
    """One request per prompt, with keys -1, -2, ...; keys of training are not negative."""

    @classmethod
    def create(
        cls,
        sets: Mapping[str, Sequence[Prompt]],
        config: EvaluationConfig,
        episodes: EpisodeRequests,
        *,
        max_response_tokens: int,
    ) -> HeldOutRequests:
        """Create the requests of each named set; responses never branch.

        Raises:
            DataError: there are no problems.
        """
        named = [(name, prompt) for name, prompts in sets.items() for prompt in prompts]
        if not named:
            raise DataError("there are no held-out problems to evaluate on; check data.held_out")
        settings = SamplingSettings(
            temperature=config.temperature,
            top_p=config.top_p,
            max_tokens=max_response_tokens,
            stop_ids=stop_ids(episodes.tokenizer),
        )
        requests = tuple(
            OpenGroup(
                key=-number,
                prompt_ids=episodes.prompt_ids(prompt),
                seeds=response_seeds(
                    config.samples_per_problem, episodes.seed, "evaluation", prompt.id
                ),
                settings=settings,
                episode=episodes.request(prompt),
                priority=EVALUATION_PRIORITY,
            )
            for number, (_, prompt) in enumerate(named, start=1)
        )
        names, problems = zip(*named, strict=True)
        return cls(prompts=problems, set_names=names, requests=requests)

    @property
    def samples_per_problem(self) -> int:
        return len(self.requests[0].seeds)

    def prompt(self, key: int) -> Prompt:
        """Return the prompt of a request."""
        return self.prompts[-key - 1]

    def evaluation(self, groups: Sequence[Group]) -> Evaluation:
        """Return the result of a policy from the groups of all problems, or of at least one."""
        of_sets = defaultdict(list)
        for group in groups:
            of_sets[self.set_names[-group.prompt_index - 1]].append(group)
        sets = {name: summary(own, self.samples_per_problem) for name, own in of_sets.items()}
        return sets[""] if "" in sets else mean_of_sets(sets)

    def digest(self, key: int) -> bytes:
        """Return a digest of all that determines a result, except for weights and scoring."""
        return group_digest(self.prompt(key), self.requests[-key - 1])


class EvaluationInProgress:
    """One evaluation, from its first request to its last result. Use it as a context manager.

    The caller says when to submit requests. Finished groups may arrive through another user of the
    same engines.
    """

    def __init__(
        self,
        engines: SupportsGenerate,
        scorer: SupportsScore,
        held_out: HeldOutRequests,
        journal: Journal[Group] | None = None,
    ) -> None:
        """`journal`: groups of a killed process, to which this evaluation adds its own."""
        self._engines = engines
        self.policy_version = engines.policy_version
        """Version of the evaluated weights; the engines keep them until the evaluation ends."""
        self._held_out = held_out
        self._journal = journal
        self._pool = ScoringPool(engines, scorer, held_out.prompt)
        self._groups: dict[int, Group] = {}
        for request in held_out.requests:
            group = None if journal is None else journal.find(held_out.digest(request.key))
            if group is not None:
                self._groups[request.key] = group
        self._waiting = [
            request for request in held_out.requests if request.key not in self._groups
        ]
        self._num_replaced: Counter[int] = Counter()
        self.num_from_journal = len(self._groups)
        """Number of problems with a group in the journal."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.close()
        if self._journal is not None:
            self._journal.close()

    @property
    def groups(self) -> list[Group]:
        """The scored groups so far, in the order of the problems."""
        known = (self._groups.get(request.key) for request in self._held_out.requests)
        return [group for group in known if group is not None]

    @property
    def so_far(self) -> Evaluation:
        """The result on the problems that have groups, of which there must be one."""
        return self._held_out.evaluation(self.groups)

    @property
    def generating(self) -> Collection[int]:
        """Keys of the groups that the engines have not returned."""
        return self._pool.generating

    @property
    def is_done(self) -> bool:
        """Whether `finish` has nothing to wait for."""
        return not self._waiting and not self._pool.open

    def submit(self, num_responses: int | None = None) -> None:
        """Submit the next requests, at most `num_responses` responses; by default all requests."""
        size = self._held_out.samples_per_problem
        requests = self._waiting[: None if num_responses is None else num_responses // size]
        if requests:
            del self._waiting[: len(requests)]
            self._pool.submit(requests)

    def take(self, groups: Sequence[OpenGroup]) -> list[OpenGroup]:
        """Score the evaluation's own groups, and return the others."""
        generating = self.generating
        own = [group for group in groups if group.key in generating]
        others = [group for group in groups if group.key not in generating]
        self._pool.score(own)
        self._add(self._pool.scored())
        return others

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take finished groups from engines that only this evaluation uses."""
        self.take(self._engines.finished(timeout_s))

    def finish(self) -> Evaluation:
        """Submit the remaining requests and wait for all; no other caller may use the engines."""
        self.submit()
        told = time.monotonic()
        while self._pool.open:
            self._add(self._pool.wait())
            if self._groups and time.monotonic() > told + TELL_S:
                told = time.monotonic()
                done, total = len(self._groups), len(self._held_out.requests)
                logger.info("evaluation: %d of %d problems have answers", done, total)
        return self.so_far

    def _add(self, groups: Sequence[Group]) -> None:
        for group in groups:
            if not group.responses:
                if self._replace(group):
                    continue
                last = group.failures[-1]
                raise InfraError(
                    f"evaluation: {last.source} failed on all responses to problem "
                    f"{group.prompt.id}: {last.reason}"
                )
            # experts are for updates, and those of all problems may take gigabytes
            responses = tuple(replace(one, experts=None) for one in group.responses)
            group = replace(group, responses=responses)
            self._groups[group.prompt_index] = group
            if self._journal is not None and not group.failures:
                self._journal.append(self._held_out.digest(group.prompt_index), group)

    def _replace(self, group: Group) -> bool:
        """Ask for other episodes of a problem whose episodes all failed; False: not for these.

        A restart fails open episodes with recovery = "once", and would do so each time. Other seeds
        give other names to episodes.
        """
        request = self._held_out.requests[-group.prompt_index - 1]
        episode, number = request.episode, self._num_replaced[request.key]
        if episode is None or episode.config.recovery != "once" or number == MAX_REPLACED:
            return False
        if any(failure.function != episode.area for failure in group.failures):
            return False
        self._num_replaced[request.key] += 1
        seeds = (continued_seed(seed, np.array([number])) for seed in request.seeds)
        self._pool.submit([replace(request, seeds=tuple(seeds))])
        return True


class InterleavedEngines:
    """The engines as the sampler sees them while an evaluation shares them.

    Training comes first: requests of the evaluation are only submitted to slots that training
    leaves idle, and engines serve them last. So the evaluation changes when the groups of a step
    finish, but nothing else.
    """

    def __init__(self, engines: Engines) -> None:
        self.evaluation: EvaluationInProgress | None = None
        """The evaluation that shares the engines, if there is one."""
        self._engines = engines
        self._in_flight: set[int] = set()

    @property
    def policy_version(self) -> int:
        return self._engines.policy_version

    @property
    def capacity(self) -> int:
        """Number of responses to submit, as if the evaluation's slots were empty."""
        return self._engines.capacity_without(
            () if self.evaluation is None else self.evaluation.generating
        )

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def submit(self, groups: Sequence[OpenGroup]) -> None:
        self._in_flight.update(group.key for group in groups)
        self._engines.submit(groups)

    def finished(self, timeout_s: float | None = None) -> list[OpenGroup]:
        """Return finished training groups; empty if only the evaluation's have finished."""
        if self.evaluation is None:
            groups = self._engines.finished(timeout_s)
        else:
            self.evaluation.submit(self._engines.capacity)
            groups = self.evaluation.take(self._engines.finished(timeout_s))
        self._in_flight.difference_update(group.key for group in groups)
        return groups

    def stop(self, keys: Collection[int] | None = None, *, keep: bool) -> StopReport:
        chosen = set(self._in_flight if keys is None else self._in_flight & set(keys))
        self._in_flight -= chosen
        report = self._engines.stop(chosen, keep=keep)
        if keys is None and self.evaluation is not None:
            # training does not use the engines until the next weights
            self.evaluation.submit()
        return report

    def activity(self) -> list[EngineActivity]:
        """Return the activity of each engine, including the evaluation's share."""
        return self._engines.activity()
