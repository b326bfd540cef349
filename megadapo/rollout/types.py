"""What the driver asks an engine for and what it gets back: plain data, one object a group."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from megadapo.algorithm.groups import Branch
from megadapo.rollout.config import BranchingConfig
from megadapo.rollout.tools import ToolsConfig

FinishReason = Literal["stop", "length", "unfinished"]
SEED_BITS = 63
"""vLLM seeds are signed 64-bit integers."""


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """The distribution that responses are drawn from."""

    temperature: float
    top_p: float
    max_tokens: int
    """Longest response, in tokens, what tools put out included."""
    tools: ToolsConfig = ToolsConfig()
    """What responses may call."""
    branching: BranchingConfig = BranchingConfig()
    """Where responses branch off each other."""


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A place in a response where a tool was asked."""

    end: int
    """Response tokens before the model went on, the tool's output included."""
    entropy: float = math.nan
    """Normalised entropy of the first tokens behind it; NaN where it was not measured."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """One response, as the engine gave it."""

    token_ids: np.ndarray  # [n] int32, with the end-of-sequence token where there is one
    logprobs: np.ndarray  # [n] float32, at the sampling temperature; NaN where there is none
    finish_reason: FinishReason
    """Unfinished where it was stopped; a request that has it as `begun` continues it."""
    text: str
    """Decoded without special tokens."""
    policy_versions: np.ndarray  # [n] int32, the weight publication that sampled each token, or
    # NO_VERSION where a tool put it out
    calls: tuple[ToolCall, ...] = ()
    """In order."""
    entropy: float = math.nan
    """Normalised entropy of its first tokens; NaN where it was not measured."""
    branch: Branch | None = None
    """Where it left another response of its group; None where it began at the prompt."""
    experts: np.ndarray | None = None  # [m, layers, K] as in data/routed_experts.py
    """Of prompt and response, each token's from when it was first read; None where the engine hands
    none over."""


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """One prompt, asked for once per seed."""

    key: int
    """Names the group among those in flight."""
    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    settings: SamplingSettings
    priority: int = 0
    """An engine works on lower ones first."""
    begun: tuple[Response, ...] = ()
    """What an earlier request got, one per seed: finished responses are handed back as they are,
    the others are continued. Empty: nothing."""

    @property
    def num_at_once(self) -> int:
        """Most responses that are generated at the same time."""
        first = self.settings.branching.initial_rollouts
        return len(self.seeds) if first is None else min(first, len(self.seeds))


@dataclass(frozen=True, kw_only=True)
class GroupResponse:
    """The responses to a GroupRequest, in the order of its seeds."""

    key: int
    responses: tuple[Response, ...]
    engine: int = 0
    """Number of the engine that generated them."""
    seconds: float = 0.0
    """From submission until the last token."""

    @property
    def num_tokens(self) -> int:
        """Of all responses."""
        return sum(len(response.token_ids) for response in self.responses)


@dataclass(frozen=True, kw_only=True)
class StopReport:
    """What became of the groups that were stopped."""

    keys: tuple[int, ...]
    unfinished: tuple[GroupResponse, ...]
    """What they have so far, where it was to be kept; a response that had finished says so."""
    num_tokens: int
    """Tokens that were generated for them, without those they had begun with."""


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """What an engine tells the driver, again and again."""

    groups: tuple[GroupResponse, ...]
    """Finished since the report before."""
    num_ended: int
    """Responses that have ended since the engine started, those that were stopped included; where
    groups branch, without those whose place another one of the group takes."""
    num_tokens: int
    """Tokens generated since the engine started."""


class LogprobTable(Protocol):
    """The log-probs of a response's positions in flat lists, as vLLM's FlatLogprobs holds them.

    Position i has the entries start_indices[i] to end_indices[i] of the two other lists.
    """

    start_indices: Sequence[int]
    end_indices: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]


def response_seeds(num_responses: int, *parts: str | int) -> tuple[int, ...]:
    """Return the seeds of a group: hashes of what names each response, the same everywhere."""
    name = "/".join(str(part) for part in parts)
    digests = [
        hashlib.sha256(f"{name}/{index}".encode()).digest() for index in range(num_responses)
    ]
    return tuple(int.from_bytes(digest[:8], "little") >> (64 - SEED_BITS) for digest in digests)


def continued_seed(seed: int, token_ids: np.ndarray) -> int:
    """Return the seed of what follows `token_ids`: an engine's noise starts anew with a request."""
    if not len(token_ids):
        return seed
    digest = hashlib.sha256(str(seed).encode() + token_ids.tobytes()).digest()
    return int.from_bytes(digest[:8], "little") >> (64 - SEED_BITS)


def sampled_logprobs(token_ids: Sequence[int], table: LogprobTable | None) -> np.ndarray:
    """Return the log-prob of each sampled token, [n] float32.

    A position without an entry for its token stays NaN: any number in its place would be a
    probability that nobody measured.
    """
    values = np.full(len(token_ids), np.nan, dtype=np.float32)
    if table is None:
        return values
    starts, ends = table.start_indices, table.end_indices
    each_has_one = len(starts) == len(token_ids) and all(map(operator.lt, starts, ends))
    if each_has_one and [table.token_ids[start] for start in starts] == list(token_ids):
        values[:] = [table.logprobs[start] for start in starts]
        return values
    bounds = zip(token_ids, table.start_indices, table.end_indices, strict=False)
    for position, (token, start, end) in enumerate(bounds):
        for entry in range(start, end):
            if table.token_ids[entry] == token and table.logprobs[entry] is not None:
                values[position] = table.logprobs[entry]
                break
    return values
