"""Groups: one prompt with its responses and their scores, as every part of the loop passes them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from megadapo.algorithm.groups import Branch, Steps, branches_among
from megadapo.data.prompts import Prompt

NO_VERSION = -1
"""The policy version of a token that was given, not sampled: of prompts, tools, environments."""
NO_ANSWER = "[INVALID]"
"""The answer of a response in which a rule finds none, as verl writes it."""

FinishReason = Literal["stop", "max_turns", "length", "unfinished", "failed"]
RewardParts = tuple[tuple[str, float], ...]
"""(name, value) of each part of a reward."""
FAILED = "failed"
"""Name of the part that is 1 if a function failed, else 0; its mean is the share of failures."""
FAILURES = "failures"
"""Area of the numbers of failures of an environment, each by its kind of cause."""
INTERRUPTED = "interrupted"
"""Cause of the failure of an episode that a restart interrupted and that must not be repeated."""
MIN_RESPONSES = 2
"""Fewest responses of a group: a single one has nothing to be compared with."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A turn of the model inside a response, and the output of a tool or environment after it."""

    end: int
    """Number of response tokens up to the end of the output."""
    entropy: float = math.nan
    """Normalised entropy of the first tokens after the output; NaN if it was not measured."""
    reward: float = 0.0
    """Reward that its environment gave for the turn."""
    seconds: float = 0.0
    """Time that the environment took."""
    is_call: bool = True
    """Whether the output answers a call; False after the last turn, and after a stop text that
    ends no call."""
    metrics: tuple[tuple[str, float], ...] = ()
    """(name, value) of each number that its environment counted."""


class Failure(NamedTuple):
    """A failure of a reward function or an environment on a response."""

    function: str
    """Name of the function in metrics, or "environment/NAME"."""
    reason: str

    @property
    def source(self) -> str:
        """The failure in words."""
        kind, slash, name = self.function.partition("/")
        return f"{kind} {name}" if slash else f"reward function {kind}"

    @property
    def is_interruption(self) -> bool:
        """Whether only a restart is the cause: an episode that is not repeated was open then."""
        return self.reason.startswith(INTERRUPTED)


@dataclass(frozen=True, kw_only=True, eq=False)
class Response:
    """One response as the engine returned it; its tokens are never re-tokenised.

    Arrays, because 8,192 responses of 5,000 tokens are gigabytes as Python numbers.
    """

    token_ids: np.ndarray
    """[n] int32, including the end-of-sequence token if there is one, and output of tools and
    environments."""
    logprobs: np.ndarray
    """[n] float32 engine log-probs at the sampling temperature; NaN if the engine gave none."""
    finish_reason: FinishReason
    """max_turns: its environment takes no further action, so it is complete. An unfinished response
    was stopped; a later request can continue it. A failed one has no score, because its environment
    failed."""
    text: str
    """The response decoded without special tokens."""
    policy_versions: np.ndarray
    """[n] int32 policy version that sampled each token, NO_VERSION on output of tools and
    environments."""
    turns: tuple[Turn, ...] = ()
    """Turns that are followed by an output."""
    entropy: float = math.nan
    """Normalised entropy of its first tokens; NaN if it was not measured."""
    branch: Branch | None = None
    """Branch point on another response of the group; None if it starts at the prompt."""
    experts: np.ndarray | None = None
    """[m, layers, experts per token] expert numbers of the first m tokens of prompt and response.

    The last token of a response is sampled but never read, so the engine has no experts for it.
    None if the engine does not return them."""
    failure: Failure | None = None
    """Failure of its environment, if the finish reason is "failed"."""

    @property
    def truncated(self) -> bool:
        """Whether it was cut at the longest length, of a response or of a turn."""
        return self.finish_reason == "length"

    @property
    def is_sampled(self) -> np.ndarray:
        """[n] bool, False on output of tools and environments."""
        return np.asarray(self.policy_versions != NO_VERSION)

    @property
    def actions(self) -> list[slice]:
        """The sampled tokens of each of its turns; an output with none before it has no action."""
        starts = [0, *(turn.end for turn in self.turns)]
        sampled = self.is_sampled
        found = (
            slice(start, start + int(sampled[start : turn.end].sum()))
            for start, turn in zip(starts, self.turns, strict=False)
        )
        return [one for one in found if one.start < one.stop]

    @property
    def episode_return(self) -> float:
        """The sum of what its turns earned in its environment."""
        return math.fsum(turn.reward for turn in self.turns)

    @property
    def metrics(self) -> dict[str, float]:
        """The sum over its turns of each number that its environment counted."""
        counted: dict[str, float] = {}
        for name, value in (one for turn in self.turns for one in turn.metrics):
            counted[name] = counted.get(name, 0.0) + value
        return counted

    @property
    def oldest_version(self) -> float:
        """The earliest policy version among its sampled tokens; infinite without any."""
        versions = self.policy_versions[self.is_sampled]
        return int(versions.min()) if len(versions) else math.inf


@dataclass(frozen=True)
class Score:
    """The verifier's result for one response."""

    reward: float
    """Reward before any shaping; the rule gives +1.0 or -1.0."""
    correct: bool
    """Whether the response is correct; selection and accuracy use this."""
    answer: str
    """The answer as it was compared, or NO_ANSWER; empty from a function without answers."""
    symbolic_correct: bool | None = None
    """Whether the symbolic comparison accepts it; None if it did not run or gave up."""
    parts: RewardParts = ()
    """Parts of the reward, if more than the rule scores."""
    steps: Steps = ()
    """Scored steps with their shares of the reward, if a function scores steps."""
    failure: Failure | None = None
    """Failure that leaves the response out of its group."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """One prompt with its G scored responses: the unit of sampling, selection and advantage."""

    prompt_index: int
    """Position in the prompt stream, increasing over the run."""
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    responses: tuple[Response, ...]
    scores: tuple[Score, ...]
    failures: tuple[Failure, ...] = ()
    """Why responses were left out, one entry for each."""
    seconds: float = field(default=0.0, repr=False)
    """Time from submission to the last token; not saved."""

    def without_failures(self) -> Group:
        """Return the group without the responses that have no score."""
        failures = tuple(score.failure for score in self.scores if score.failure is not None)
        if not failures:
            return self
        kept = [index for index, score in enumerate(self.scores) if score.failure is None]
        branches = branches_among(self.branches, kept)
        return replace(
            self,
            responses=tuple(
                replace(self.responses[index], branch=branch)
                for index, branch in zip(kept, branches, strict=True)
            ),
            scores=tuple(self.scores[index] for index in kept),
            failures=failures,
        )

    @property
    def parts(self) -> RewardParts:
        """Parts of the rewards of all responses, and a part for each failure."""
        of_scores = (part for score in self.scores for part in score.parts)
        return (*of_scores, *((f"{failure.function}/{FAILED}", 1.0) for failure in self.failures))

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(score.reward for score in self.scores)

    @property
    def correct(self) -> tuple[bool, ...]:
        return tuple(score.correct for score in self.scores)

    @property
    def steps(self) -> tuple[Steps, ...]:
        return tuple(score.steps for score in self.scores)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each response, including tool output."""
        return tuple(len(response.token_ids) for response in self.responses)

    @property
    def num_sampled(self) -> tuple[int, ...]:
        """Number of tokens of each response that the policy sampled."""
        return tuple(int(response.is_sampled.sum()) for response in self.responses)

    @property
    def branches(self) -> tuple[Branch | None, ...]:
        return tuple(response.branch for response in self.responses)

    @property
    def num_generated(self) -> int:
        """Number of sampled tokens of all responses; shared tokens count once."""
        own = (response.branch.num_tokens if response.branch else 0 for response in self.responses)
        pairs = zip(self.responses, own, strict=True)
        return sum(int(response.is_sampled[first:].sum()) for response, first in pairs)

    @property
    def oldest_version(self) -> float:
        """The earliest policy version among the sampled tokens of all responses."""
        return min(response.oldest_version for response in self.responses)

    @property
    def truncated(self) -> tuple[bool, ...]:
        """Whether each response was cut at the length limit."""
        return tuple(response.truncated for response in self.responses)
