"""What the driver asks an engine for and what it gets back: plain data, one object a group."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

SEED_BITS = 63
"""vLLM seeds are signed 64-bit integers."""


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """The distribution that responses are drawn from."""

    temperature: float
    top_p: float
    max_tokens: int
    """Longest response, in tokens."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """One response, as the engine gave it."""

    token_ids: np.ndarray  # [n] int32, with the end-of-sequence token where there is one
    logprobs: np.ndarray  # [n] float32, at the sampling temperature; NaN where there is none
    finish_reason: Literal["stop", "length", "unfinished"]
    """Unfinished where it was stopped; a request that has it as `begun` continues it."""
    text: str
    """Decoded without special tokens."""
    policy_versions: np.ndarray  # [n] int32, the weight publication that sampled each token


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
    """Responses that have ended since the engine started, those that were stopped included."""
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
    each_has_one = list(table.start_indices) == list(range(len(token_ids)))
    if each_has_one and list(table.token_ids) == list(token_ids):
        values[:] = table.logprobs
        return values
    bounds = zip(token_ids, table.start_indices, table.end_indices, strict=False)
    for position, (token, start, end) in enumerate(bounds):
        for entry in range(start, end):
            if table.token_ids[entry] == token and table.logprobs[entry] is not None:
                values[position] = table.logprobs[entry]
                break
    return values
