"""Groups: one prompt with its responses and their scores, as every part of the loop passes them.

Their JSON form (`codec.py`), for the run's state, the journal and saved rollouts, is

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
from functools import cached_property, partial
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import (
    Field,
    PlainSerializer,
    PlainValidator,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    model_serializer,
    model_validator,
)

from megadapo.algorithm.groups import Branch, Steps, branches_among
from megadapo.codec import READABLE, Measured, Table
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
NGRAM = 8
"""Tokens of an n-gram, whose repetition is measured; a power of 2."""
_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)
MIN_RESPONSES = 2
"""Fewest responses of a group: a single one has nothing to be compared with."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A turn of the model inside a response, and the output of a tool or environment after it."""

    end: int
    """Number of response tokens up to the end of the output."""
    entropy: Measured = math.nan
    """Normalised entropy of the first tokens after the output; NaN if it was not measured."""
    reward: float = 0.0
    """Reward that its environment gave for the turn."""
    seconds: float = 0.0
    """Time that the environment took."""
    is_call: bool = True
    """Whether the output answers a call; False after the last turn, and after a stop text that
    ends no call."""
    metrics: Table[float] = ()
    """(name, value) of each number that its environment counted."""

    @model_serializer(mode="wrap")
    def _as_list(self, fields_of: SerializerFunctionWrapHandler) -> list[Any]:
        return list(fields_of(self).values())

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(cls.__dataclass_fields__, values, strict=True))


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


def _pack(kind: str, values: np.ndarray) -> str:
    return base64.b64encode(values.astype(kind).tobytes()).decode()


def _unpack(kind: str, values: str | Sequence[float | None]) -> np.ndarray:
    if isinstance(values, str):
        return np.frombuffer(base64.b64decode(values, validate=True), dtype=kind)
    return np.array([math.nan if value is None else value for value in values], dtype=kind)


def _encode_ids(values: np.ndarray, info: SerializationInfo) -> object:
    return values.tolist() if info.context == READABLE else _pack("<i4", values)


def _encode_logprobs(values: np.ndarray, info: SerializationInfo) -> object:
    return encode_floats(values) if info.context == READABLE else _pack("<f4", values)


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
    return None if values is None else _unpack("<f4", values)


def encode_versions(versions: np.ndarray) -> list[list[int]]:
    """Return [n] versions as runs, [[version, number of tokens], ...]."""
    starts = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))
    counts = np.diff(starts, append=len(versions))
    return [[int(versions[i]), int(n)] for i, n in zip(starts, counts, strict=True)]


def decode_versions(runs: Sequence[Sequence[int]], num_tokens: int) -> np.ndarray:
    """Return [num_tokens] int32 versions from their runs.

    Raises:
        ArithmeticError, TypeError, ValueError: the runs are malformed or have other tokens.
    """
    versions = np.array([version for version, _ in runs], dtype=np.int32)
    counts = [count for _, count in runs]
    # a wrong count could fill the memory
    if sum(counts) != num_tokens or (versions < NO_VERSION).any():
        raise ValueError(f"{runs} are no policy versions of {num_tokens} tokens")
    return np.repeat(versions, counts)


def _versions_of_response(runs: Sequence[Sequence[int]], info: ValidationInfo) -> np.ndarray:
    # without tokens, these have an error of their own
    return decode_versions(runs, len(info.data.get("token_ids", ())))


EXPERT_TYPES = {"uint8": "<u1", "uint16": "<u2"}
"""Names of the types of expert numbers, and how each is stored."""


def expert_dtype(num_experts: int) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
    """Return the type that holds the numbers of `num_experts` experts."""
    return np.dtype(np.uint8) if num_experts <= 256 else np.dtype(np.uint16)


def encode_experts(experts: np.ndarray | None) -> dict[str, Any] | None:
    """Return expert numbers [m, layers, experts per token] as JSON values."""
    if experts is None:
        return None
    kind = experts.dtype.name
    data = _pack(EXPERT_TYPES[kind], experts)
    return {"shape": list(experts.shape), "dtype": kind, "data": data}


def decode_experts(entry: Mapping[str, Any] | None) -> np.ndarray | None:
    """Return the array that `encode_experts` wrote."""
    if entry is None:
        return None
    values = _unpack(EXPERT_TYPES[entry["dtype"]], entry["data"])
    tokens, layers, per_token = entry["shape"]
    return values.reshape(tokens, layers, per_token).astype(entry["dtype"])


def repeated_share(token_ids: np.ndarray) -> float:
    """Return the share of a response's n-grams that it has had before; 0 if it has no n-gram.

    Source: seq-rep-n of arXiv 1908.04319, 1 - |different n-grams| / |n-grams|.
    """
    if len(token_ids) < NGRAM:
        return 0.0
    hashes, factor, width = token_ids.astype(np.uint64), _HASH_FACTOR, 1
    # a polynomial modulo 2^64, over runs of 2, 4 and 8 tokens
    while width < NGRAM:
        hashes = hashes[:-width] * factor + hashes[width:]
        factor, width = np.multiply(factor, factor), 2 * width
    hashes.sort()
    return float((hashes[1:] == hashes[:-1]).sum() / len(hashes))


@dataclass(frozen=True, kw_only=True, eq=False)
class Response:
    """One response as the engine returned it; its tokens are never re-tokenised.

    Arrays, because 8,192 responses of 5,000 tokens are gigabytes as Python numbers.
    """

    text: str
    """The response decoded without special tokens."""
    token_ids: Annotated[
        np.ndarray, PlainValidator(partial(_unpack, "<i4")), PlainSerializer(_encode_ids)
    ]
    """[n] int32, including the end-of-sequence token if there is one, and output of tools and
    environments."""
    logprobs: Annotated[
        np.ndarray,
        PlainValidator(partial(_unpack, "<f4")),
        PlainSerializer(_encode_logprobs),
        Field(alias="logprobs_rollout"),
    ]
    """[n] float32 engine log-probs at the sampling temperature; NaN if the engine gave none."""
    finish_reason: FinishReason
    """max_turns: its environment takes no further action, so it is complete. An unfinished response
    was stopped; a later request can continue it. A failed one has no score, because its environment
    failed."""
    policy_versions: Annotated[
        np.ndarray, PlainValidator(_versions_of_response), PlainSerializer(encode_versions)
    ]
    """[n] int32 policy version that sampled each token, NO_VERSION on output of tools and
    environments."""
    turns: tuple[Turn, ...] = ()
    """Turns that are followed by an output."""
    entropy: Measured = math.nan
    """Normalised entropy of its first tokens; NaN if it was not measured."""
    branch: Branch | None = None
    """Branch point on another response of the group; None if it starts at the prompt."""
    experts: Annotated[
        np.ndarray | None, PlainValidator(decode_experts), PlainSerializer(encode_experts)
    ] = None
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
    def mean_logprob(self) -> float:
        """The mean of its sampled tokens' finite log-probs; NaN if the engine gave none."""
        known = self.logprobs[self.is_sampled & np.isfinite(self.logprobs)]
        return float(known.mean(dtype=np.float64)) if len(known) else math.nan

    @cached_property
    def repetition(self) -> float:
        """The share of repeated n-grams among its sampled tokens, `repeated_share`."""
        return repeated_share(self.token_ids[self.is_sampled])

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
    parts: Annotated[Table[float], Field(alias="reward_parts")] = ()
    """Parts of the reward, if more than the rule scores."""
    texts: Annotated[
        Table[str], Field(alias="reward_texts", exclude_if=lambda texts: not texts)
    ] = ()
    """(name, text) of what functions return beside numbers."""
    steps: Steps = ()
    """Scored steps with their shares of the reward, if a function scores steps."""
    failure: Annotated[Failure | None, Field(exclude=True)] = None
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
    """Time from submission to the last token."""

    @model_serializer(mode="wrap")
    def _with_flat_responses(self, fields_of: SerializerFunctionWrapHandler) -> dict[str, Any]:
        entry = fields_of(self)
        pairs = zip(entry["responses"], entry.pop("scores"), strict=True)
        return {**entry, "responses": [response | score for response, score in pairs]}

    @model_validator(mode="before")
    @classmethod
    def _from_flat_responses(cls, entry: Mapping[str, Any]) -> dict[str, Any]:
        return {**entry, "scores": entry["responses"]}

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
    def mean_logprobs(self) -> tuple[float, ...]:
        """Mean log-prob of each response under the policy that sampled it."""
        return tuple(response.mean_logprob for response in self.responses)

    @property
    def repetitions(self) -> tuple[float, ...]:
        """The share of repeated n-grams in each response."""
        return tuple(response.repetition for response in self.responses)

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
