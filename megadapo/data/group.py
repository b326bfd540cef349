"""Groups: one prompt with its responses and their scores, as every part of the loop passes them.

Their JSON form, for the run's state, the journal and saved rollouts, is

    {"prompt_index": int, "prompt": {...}, "prompt_ids": [int, ...], "responses": [{...}, ...],
     "failures": [[function, reason], ...]}

where a response has the fields of its `Response` and its `Score`. In the run's state and the
journal "token_ids" and "logprobs_rollout" are base64 of their exact bytes, which is half the size
of decimal text. In saved rollouts they are lists, with null for a log-prob that is not finite.
Policy versions are runs of equal values, [version, number of tokens].
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from megadapo.algorithm.groups import Branch, Steps, branches_among
from megadapo.data.prompts import Prompt
from megadapo.errors import DataError

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
CUT_MESSAGES = "cut_messages"
"""Name of the number of messages and texts of an environment that were cut off."""
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
    correct: bool | None
    """Whether the response is correct; None if no function says. Selection and accuracy use it."""
    answer: str
    """The answer as it was compared, or NO_ANSWER; empty from a function without answers."""
    symbolic_correct: bool | None = None
    """Whether the symbolic comparison accepts it; None if it did not run or gave up."""
    parts: RewardParts = ()
    """Parts of the reward, if more than the rule scores."""
    texts: tuple[tuple[str, str], ...] = ()
    """(name, text) of what functions return beside numbers."""
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
    def correct(self) -> tuple[bool, ...] | None:
        """Whether each response is correct; None if that is not known of all."""
        known = tuple(score.correct for score in self.scores if score.correct is not None)
        return known if len(known) == len(self.scores) else None

    def need_correct(self) -> tuple[bool, ...]:
        """Return whether each response is correct.

        Raises:
            DataError: no reward function says.
        """
        if self.correct is None:
            raise DataError(
                f"prompt {self.prompt.id}: no reward function says which responses are correct: "
                "set right_above in reward.functions"
            )
        return self.correct

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


MAX_VERSION = int(np.iinfo(np.int32).max)
EXPERT_TYPES = {"uint8": "<u1", "uint16": "<u2"}
"""Names of the types of expert numbers, and how each is stored."""


def encode_group(group: Group) -> dict[str, Any]:
    """Return a group as JSON values; its numbers stay exact."""
    pairs = zip(group.responses, group.scores, strict=True)
    return {
        "prompt_index": group.prompt_index,
        "prompt": group.prompt.to_json(),
        "prompt_ids": list(group.prompt_ids),
        "responses": [encode_response(one) | encode_score(score) for one, score in pairs],
        "failures": [list(failure) for failure in group.failures],
    }


def decode_group(entry: Mapping[str, Any]) -> Group:
    """Return the group that was encoded."""
    responses = tuple(decode_response(response) for response in entry["responses"])
    _check_branches(responses)
    return Group(
        prompt_index=entry["prompt_index"],
        prompt=Prompt.from_json(entry["prompt"]),
        prompt_ids=tuple(entry["prompt_ids"]),
        responses=responses,
        scores=tuple(
            decode_score(one, len(response.token_ids))
            for one, response in zip(entry["responses"], responses, strict=True)
        ),
        failures=tuple(Failure(*map(str, failure)) for failure in entry.get("failures", [])),
    )


def encode_response(response: Response, *, readable: bool = False) -> dict[str, Any]:
    """Return a response as JSON values; `readable`: with numbers as lists, not as base64."""
    token_ids, logprobs = response.token_ids, response.logprobs
    return {
        "text": response.text,
        "token_ids": token_ids.tolist() if readable else _pack(token_ids, "<i4"),
        "logprobs_rollout": encode_floats(logprobs) if readable else _pack(logprobs, "<f4"),
        "finish_reason": response.finish_reason,
        "policy_versions": encode_versions(response.policy_versions),
        "turns": [
            [
                *(turn.end, _finite_or_none(turn.entropy), turn.reward, turn.seconds, turn.is_call),
                dict(turn.metrics),
            ]
            for turn in response.turns
        ],
        "entropy": _finite_or_none(response.entropy),
        "branch": None if response.branch is None else list(response.branch),
        "experts": encode_experts(response.experts),
        "failure": None if response.failure is None else list(response.failure),
    }


def decode_response(entry: Mapping[str, Any]) -> Response:
    """Return the response that was encoded, readable or not.

    Raises:
        KeyError, TypeError, ValueError: the entry is not a response.
    """
    _check_types(entry, {"text": str, "finish_reason": str})
    token_ids = _unpack(entry["token_ids"], "<i4")
    logprobs = _unpack(entry["logprobs_rollout"], "<f4")
    if len(token_ids) != len(logprobs):
        raise ValueError(f"{len(token_ids)} tokens have {len(logprobs)} log-probs")
    return Response(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=entry["finish_reason"],
        text=entry["text"],
        policy_versions=decode_versions(entry["policy_versions"], len(token_ids)),
        turns=tuple(map(_decode_turn, entry["turns"] if "turns" in entry else entry["calls"])),
        entropy=_or_nan(entry["entropy"]),
        branch=_decode_branch(entry["branch"]),
        experts=decode_experts(entry["experts"]),
        failure=Failure(*map(str, entry["failure"])) if entry.get("failure") else None,
    )


def encode_score(score: Score) -> dict[str, Any]:
    """Return a score as JSON values."""
    return {
        "reward": score.reward,
        "correct": score.correct,
        "answer": score.answer,
        "symbolic_correct": score.symbolic_correct,
        "reward_parts": dict(score.parts),
        **({"reward_texts": dict(score.texts)} if score.texts else {}),
        "steps": [list(step) for step in score.steps],
    }


def decode_score(entry: Mapping[str, Any], num_tokens: int) -> Score:
    """Return the score that was encoded, of a response with `num_tokens` tokens.

    Raises:
        KeyError, TypeError, ValueError: the entry is not a score.
    """
    of_truth: Any = bool | None
    kinds = {"correct": of_truth, "answer": str, "symbolic_correct": of_truth}
    _check_types(entry, {"reward": int | float, **kinds})
    steps = tuple((int(end), float(value)) for end, value in entry["steps"])
    ends = [0, *(end for end, _ in steps), num_tokens]
    if ends != sorted(ends):
        raise ValueError(f"steps end at {ends[1:-1]} in a response of {num_tokens} tokens")
    return Score(
        reward=entry["reward"],
        correct=entry["correct"],
        answer=entry["answer"],
        symbolic_correct=entry["symbolic_correct"],
        parts=tuple((name, float(value)) for name, value in entry["reward_parts"].items()),
        texts=tuple((name, str(text)) for name, text in entry.get("reward_texts", {}).items()),
        steps=steps,
    )


def encode_floats(values: np.ndarray | None) -> list[float | None] | None:
    """Return float32 values in the fewest digits that restore them; null if not finite."""
    if values is None:
        return None
    import pyarrow

    column = pyarrow.array(values.astype(np.float32), mask=~np.isfinite(values))
    # Arrow prints the shortest text of a float32; a Python float has the digits of a float64.
    texts = column.cast(pyarrow.string()).to_pylist()
    return [None if text is None else float(text) for text in texts]


def decode_floats(values: Sequence[float | None] | None) -> np.ndarray | None:
    """Return the [n] float32 values that `encode_floats` wrote, NaN for null."""
    if values is None:
        return None
    return np.array([np.nan if value is None else value for value in values], dtype=np.float32)


def encode_versions(versions: np.ndarray) -> list[list[int]]:
    """Return [n] versions as runs, [[version, number of tokens], ...]."""
    starts = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))
    counts = np.diff(starts, append=len(versions))
    return [[int(versions[i]), int(n)] for i, n in zip(starts, counts, strict=True)]


def decode_versions(runs: Sequence[Sequence[int]], num_tokens: int) -> np.ndarray:
    """Return [num_tokens] int32 versions from their runs.

    Raises:
        TypeError, ValueError: the runs are malformed or do not cover `num_tokens` tokens.
    """
    pairs = [(version, count) for version, count in runs]
    counts = [count for _, count in pairs]
    if min(counts, default=0) < 0 or sum(counts) != num_tokens:
        raise ValueError(f"policy versions {runs} do not cover {num_tokens} tokens")
    if any(not NO_VERSION <= version <= MAX_VERSION for version, _ in pairs):
        raise ValueError(f"policy versions {runs} are not all from {NO_VERSION} to {MAX_VERSION}")
    versions = np.array([version for version, _ in pairs], dtype=np.int32)
    return np.repeat(versions, counts)


def expert_dtype(num_experts: int) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
    """Return the type that holds the numbers of `num_experts` experts."""
    return np.dtype(np.uint8) if num_experts <= 256 else np.dtype(np.uint16)


def encode_experts(experts: np.ndarray | None) -> dict[str, Any] | None:
    """Return expert numbers [m, layers, experts per token] as JSON values."""
    if experts is None:
        return None
    return {
        "shape": list(experts.shape),
        "dtype": experts.dtype.name,
        "data": _pack(experts, EXPERT_TYPES[experts.dtype.name]),
    }


def decode_experts(entry: Mapping[str, Any] | None) -> np.ndarray | None:
    """Return the array that `encode_experts` wrote.

    Raises:
        KeyError, TypeError, ValueError: the entry is malformed, or routes a token to one expert
            twice.
    """
    if entry is None:
        return None
    tokens, layers, per_token = (int(size) for size in entry["shape"])
    values = np.frombuffer(
        base64.b64decode(entry["data"], validate=True), EXPERT_TYPES[entry["dtype"]]
    )
    if len(values) != math.prod((tokens, layers, per_token)):
        raise ValueError(f"{len(values)} expert numbers do not have the shape {entry['shape']}")
    experts = values.reshape(tokens, layers, per_token).astype(entry["dtype"])
    ascending = np.sort(experts, axis=-1)
    # a token with fewer different experts than the others makes dispatchers hang
    if (ascending[..., 1:] == ascending[..., :-1]).any():
        raise ValueError("a token is routed to one expert twice")
    return experts


def _decode_turn(entry: Sequence[Any]) -> Turn:
    # older files have calls of tools alone, with two values, or turns without metrics
    missing: list[Any] = [0.0, 0.0, True, {}][len(entry) - 2 :]
    end, entropy, reward, seconds, is_call, metrics = [*entry, *missing]
    return Turn(
        end=int(end),
        entropy=_or_nan(entropy),
        reward=float(reward),
        seconds=float(seconds),
        is_call=bool(is_call),
        metrics=tuple((name, float(value)) for name, value in metrics.items()),
    )


def _decode_branch(pair: Sequence[int] | None) -> Branch | None:
    if pair is None:
        return None
    parent, num_tokens = pair
    if not isinstance(parent, int) or not isinstance(num_tokens, int):
        raise TypeError(f"a branch is at {num_tokens!r} tokens of response {parent!r}")
    return Branch(parent, num_tokens)


def _check_branches(responses: Sequence[Response]) -> None:
    """Raise ValueError if a response branches outside of an earlier response."""
    for index, response in enumerate(responses):
        if (branch := response.branch) is None:
            continue
        within = 0 <= branch.parent < index and 0 <= branch.num_tokens <= min(
            len(response.token_ids), len(responses[branch.parent].token_ids)
        )
        if not within:
            raise ValueError(f"response {index} cannot have the branch {branch}")


def _check_types(entry: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    for name, kind in kinds.items():
        if not isinstance(entry[name], kind):
            raise TypeError(f"{name} is a {type(entry[name]).__name__}")


def _pack(values: np.ndarray, kind: str) -> str:
    return base64.b64encode(values.astype(kind).tobytes()).decode()


def _unpack(values: str | Sequence[float | None], kind: str) -> np.ndarray:
    if isinstance(values, str):
        return np.frombuffer(base64.b64decode(values, validate=True), dtype=kind)
    return np.array([math.nan if value is None else value for value in values], dtype=kind)


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)
