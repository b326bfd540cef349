"""One step of sampling under way: what is out, what came back, what is given up."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from megadapo.data.batch import Group, Sample
from megadapo.rollout.sampling.plans import Plan
from megadapo.rollout.sampling.reserve import Unfinished
from megadapo.rollout.sampling.sampled_batch import GroupStats, StepCounters
from megadapo.rollout.sampling.scoring import Answer, PromptRequest, ScoringPool
from megadapo.rollout.types import Response


@dataclass(kw_only=True)
class Step:
    """The plan of a step, the questions that are out, and what has become of the others."""

    plan: Plan
    inquiry: ScoringPool
    tally: StepCounters
    kept: dict[int, Group] = field(default_factory=dict)
    """Groups with a signal, by order."""
    stopped: list[int] = field(default_factory=list)
    """Orders that were taken back unfinished."""

    def settle(self, group: Group, outcome: GroupStats) -> None:
        """Keep a group that came back, or remember no more of it than its numbers."""
        self.plan.settle(group.order, outcome.is_mixed)
        self.tally.outcomes.append(outcome)
        if outcome.is_mixed:
            self.kept[group.order] = group
        else:
            self.tally.thrown_away.add(group)

    def drop_hopeless(self) -> None:
        """Free the slots of groups that cannot get into the batch any more."""
        if self.plan.is_full or not (orders := self.plan.cannot_make_batch()):
            return
        self.plan.drop(orders)
        self.stopped += orders
        self.tally.num_tokens_stopped += self.inquiry.drop(orders)

    def stop(self, *, keep: bool) -> list[Unfinished]:
        """End what is still generated; `keep`: return it, to be gone on with in the next step."""
        num_open = len(self.plan.open)
        report = self.inquiry.stop(keep=keep)
        if keep:
            self.tally.num_carried = num_open
        else:
            self.stopped += self.plan.open
            self.tally.num_tokens_stopped += report.num_tokens
        self.tally.num_stopped = len(self.stopped)
        self.tally.outcomes.sort(key=lambda outcome: outcome.order)
        return [Unfinished(order=one.key, responses=one.responses) for one in report.unfinished]

    def surplus(self, chosen: Collection[int]) -> list[Group]:
        """Groups with a signal that are not in the batch, in asking order."""
        return [self.kept[order] for order in sorted(self.kept.keys() - set(chosen))]


def group_of(answer: Answer) -> Group:
    """Put a question, its responses and their scores together."""
    question, scores = answer.question, answer.scores
    parts = tuple(score.parts for score in scores)
    steps = tuple(score.steps for score in scores)
    return Group(
        order=question.key,
        prompt=question.prompt,
        samples=tuple(_sample(question, response) for response in answer.response.responses),
        rewards=tuple(score.reward for score in scores),
        correct=tuple(score.correct for score in scores),
        answers=tuple(score.answer for score in scores),
        symbolic_correct=tuple(score.symbolic_correct for score in scores),
        reward_parts=parts if any(parts) else (),
        steps=steps if any(steps) else (),
    )


def _sample(question: PromptRequest, response: Response) -> Sample:
    if response.finish_reason == "unfinished":
        raise ValueError("a response that goes on cannot be trained on")
    return Sample(
        prompt_ids=question.prompt_ids,
        response_ids=response.token_ids,
        logprobs_rollout=response.logprobs,
        finish_reason=response.finish_reason,
        policy_versions=response.policy_versions,
        text=response.text,
        branch=response.branch,
        experts=response.experts,
    )
