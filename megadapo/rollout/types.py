"""Data that the driver, the engines and the host of environments exchange; it can be pickled.

Driver and engines exchange one object per group, and the engines' load.
"""

from __future__ import annotations

import hashlib
import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megadapo.data.group import Response
from megadapo.environments.config import EnvironmentConfig
from megadapo.environments.environment import Action, Observation, Task
from megadapo.environments.processes import EnvironmentDescription
from megadapo.rollout.config import BranchingConfig

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs

SEED_BITS = 63
"""vLLM seeds are signed 64-bit integers."""
MAX_ONE_PASS = 1024
"""Longest sequence that is scored in one pass: vLLM's older runner holds the logits of all its
tokens at once, 0.6 GB with a vocabulary of 150,000."""
CAUSES = {
    "failure": "failure",
    "exception": "exception",
    "wrong result": "exception",
    "timeout": "timeout",
    "lost process": "lost_process",
    "cannot start": "lost_process",
    "no capacity": "no_capacity",
    "not repeatable": "not_continued",
    "interrupted": "not_continued",
    "lost records": "not_continued",
    "journal": "not_continued",
    "wrong call": "not_continued",
}
"""Beginnings of failures, each with its kind in metrics. exception: any but EnvironmentFailure,
which is a "failure". not repeatable: a repeated action was answered differently. interrupted:
`recovery = "once"` does not continue. lost records: the journal lacks turns of the response.
journal: it cannot be written."""


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """The distribution of responses."""

    temperature: float
    top_p: float
    max_tokens: int
    """Longest response in tokens, including output of environments."""
    branching: BranchingConfig = BranchingConfig()
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a response. The engine also ends at the end tokens that the
    model's folder names."""


@dataclass(frozen=True, kw_only=True)
class EpisodeRequest:
    """The environment that answers the responses of a group."""

    environment: int
    """Its place in rollout.environments."""
    config: EnvironmentConfig
    description: EnvironmentDescription
    task: Task

    @property
    def area(self) -> str:
        """Prefix of its metrics."""
        return f"environment/{self.description.label}"


@dataclass(frozen=True, kw_only=True)
class OpenGroup:
    """A group that is being generated: a prompt, and the responses so far.

    The driver submits it without responses, or with those of a group that was stopped. The engine
    returns it with all responses; they have no text while one of them is unfinished.
    """

    key: int
    """Identifier among the groups in flight: the prompt index, or negative in an evaluation."""
    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    """One seed per response."""
    responses: tuple[Response, ...] = ()
    """Empty, or one per seed; engines continue unfinished ones and keep finished ones."""
    stop_at_tokens: tuple[int, ...] = ()
    """Number of tokens at which each response stops as unfinished; empty: no response stops
    early. Not with branching."""
    settings: SamplingSettings
    episode: EpisodeRequest | None = None
    """The environment that answers; None: a single turn."""
    priority: int = 0
    """Scheduling priority; engines serve lower values first."""
    seconds: float = 0.0
    """Time from submission to the last token."""

    @property
    def num_at_once(self) -> int:
        """Largest number of responses that are generated at the same time."""
        first = self.settings.branching.initial_rollouts
        return len(self.seeds) if first is None else min(first, len(self.seeds))

    @property
    def is_unfinished(self) -> bool:
        """Whether a response was stopped before its end."""
        return any(response.finish_reason == "unfinished" for response in self.responses)

    @property
    def num_tokens(self) -> int:
        return sum(len(response.token_ids) for response in self.responses)

    def repeat_failures(self) -> OpenGroup:
        """Return the group with failed responses unfinished: their last turn gets its answer again.

        They keep their tokens, so they end as if the environment had not failed.
        """
        responses = (
            replace(response, finish_reason="unfinished", text="", failure=None)
            if response.finish_reason == "failed"
            else response
            for response in self.responses
        )
        return replace(self, responses=tuple(responses))


@dataclass(frozen=True, kw_only=True)
class StopReport:
    """The result of stopping groups in flight."""

    keys: tuple[int, ...]
    unfinished: tuple[OpenGroup, ...]
    """The groups with their responses so far, if these were to be kept; some may have finished. A
    group that was lost with its engine is as it was submitted."""
    num_tokens: int
    """Number of tokens generated for the groups, without those they started with."""

    @classmethod
    def of(
        cls,
        submitted: Sequence[OpenGroup],
        complete: Sequence[OpenGroup],
        reports: Sequence[StopReport],
        *,
        keep: bool,
    ) -> StopReport:
        """Return one report on groups; some had finished, others died with their engine."""
        found = {group.key: group for report in reports for group in report.unfinished}
        found.update((group.key, group) for group in complete)
        before = {group.key: group.num_tokens for group in submitted}
        return cls(
            keys=tuple(sorted(before)),
            unfinished=tuple(found.get(group.key, group) for group in submitted) if keep else (),
            num_tokens=sum(report.num_tokens for report in reports)
            + sum(group.num_tokens - before[group.key] for group in complete),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreRequest:
    """Tokens of a sequence whose log-probs an engine computes with its current weights."""

    token_ids: tuple[int, ...]
    """A prompt and the beginning of its response, up to the last token to score."""
    positions: np.ndarray
    """[n] int64 indices of the tokens to score, ascending, above 0."""
    temperature: float

    @property
    def in_one_pass(self) -> bool:
        """Whether one pass scores all tokens; otherwise each is a request of its own."""
        return self.temperature == 1.0 and len(self.token_ids) <= MAX_ONE_PASS


@dataclass(frozen=True, kw_only=True)
class EngineCounts:
    """The work of an engine since it started."""

    num_ended: int
    """Number of responses that have ended, including stopped ones.

    With branching, a response whose slot a branch of the same group reuses is not counted."""
    num_tokens: int
    """Number of generated tokens."""
    num_waiting: int = 0
    """Number of responses that wait for their environment."""


def response_seeds(num_responses: int, *parts: str | int) -> tuple[int, ...]:
    """Return one seed per response: a hash of `parts` and its number, equal on every machine."""
    name = "/".join(str(part) for part in parts)
    digests = [
        hashlib.sha256(f"{name}/{index}".encode()).digest() for index in range(num_responses)
    ]
    return tuple(int.from_bytes(digest[:8], "little") >> (64 - SEED_BITS) for digest in digests)


def continued_seed(seed: int, token_ids: np.ndarray) -> int:
    """Return the seed for the tokens after `token_ids`.

    An engine's noise restarts with each request, so the old seed would repeat the same noise.
    """
    if not len(token_ids):
        return seed
    digest = hashlib.sha256(str(seed).encode() + token_ids.tobytes()).digest()
    return int.from_bytes(digest[:8], "little") >> (64 - SEED_BITS)


def sampled_logprobs(token_ids: Sequence[int], table: FlatLogprobs | None) -> np.ndarray:
    """Return the log-prob of each sampled token, [n] float32.

    Position i has the table's entries from start_indices[i] to end_indices[i]. One without an entry
    for its token is NaN.
    """
    values = np.full(len(token_ids), np.nan, dtype=np.float32)
    if table is None:
        return values
    starts, ends = table.start_indices, table.end_indices
    each_has_one = len(table.token_ids) == len(starts) and all(map(operator.lt, starts, ends))
    if each_has_one and list(table.token_ids) == list(token_ids):
        return np.array(table.logprobs, dtype=np.float32)
    bounds = zip(token_ids, table.start_indices, table.end_indices, strict=False)
    for position, (token, start, end) in enumerate(bounds):
        for entry in range(start, end):
            if table.token_ids[entry] == token and table.logprobs[entry] is not None:
                values[position] = table.logprobs[entry]
                break
    return values


@dataclass(kw_only=True)
class EngineActivity:
    """Activity of one engine in an interval."""

    num_tokens: int = 0
    """Number of generated response tokens."""
    seconds: float = 0.0
    """Length of the interval."""
    busy_seconds: float = 0.0
    """Time in which at least one response was running."""
    mean_running: float = 0.0
    """Mean number of running responses while busy, as a share of max_num_seqs."""
    max_waiting: int = 0
    """Largest number of waiting responses."""
    num_preemptions: int = 0
    """Number of responses that lost their key-value cache and were computed again; counted only
    with prefix caching."""
    max_kv_use: float = 0.0
    """Largest share of the key-value cache in use."""
    num_prompt_tokens: int = 0
    """Number of tokens at which requests began: prompts, with the earlier turns of episodes."""
    num_cached_tokens: int = 0
    """Number of these that were in the prefix cache."""
    private_bytes: int = 0
    """Private memory of the engine's processes at the end of the interval; 0: not measured."""


class ActivityCounter:
    """A counter of one engine's steps."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._activity = EngineActivity()
        self._running = self._tokens_before = 0
        self._last = self._started = time.monotonic()
        self._running_s = 0.0

    def step(
        self,
        *,
        running: int,
        waiting: int,
        kv_use: float,
        num_preemptions: int,
        num_prompt_tokens: int = 0,
        num_cached_tokens: int = 0,
    ) -> None:
        """Count a step, with the responses that run and wait after it."""
        self._pass_time()
        self._running, activity = running, self._activity
        activity.num_preemptions += num_preemptions
        activity.num_prompt_tokens += num_prompt_tokens
        activity.num_cached_tokens += num_cached_tokens
        activity.max_waiting = max(activity.max_waiting, waiting)
        activity.max_kv_use = max(activity.max_kv_use, kv_use)

    def take(self, num_tokens: int) -> EngineActivity:
        """Return the activity since the last call; `num_tokens` counts since the engine started."""
        self._pass_time()
        activity, self._activity = self._activity, EngineActivity()
        activity.num_tokens = num_tokens - self._tokens_before
        activity.seconds = self._last - self._started
        if activity.busy_seconds:
            activity.mean_running = self._running_s / (activity.busy_seconds * self._max_num_seqs)
        self._started, self._tokens_before, self._running_s = self._last, num_tokens, 0.0
        return activity

    def _pass_time(self) -> None:
        now = time.monotonic()
        if self._running:
            self._activity.busy_seconds += now - self._last
            self._running_s += self._running * (now - self._last)
        self._last = now


@dataclass(frozen=True)
class Outcome:
    """The answer to a turn: either an observation or a failure."""

    observation: Observation | None
    failure: str | None
    """Reason without an observation: "CAUSE: details", with a cause of `CAUSES`."""
    seconds: float
    """Time that the environment took for it."""


@dataclass
class SampledTurn:
    """A turn of the model, and the answer of its environment once there is one."""

    digest: str
    """Digest of the turn's sampled token ids; equal for equal ids only."""
    sampled: Response | None
    """Its tokens, unfinished; None if they are not known."""
    action: Action
    weights: str = ""
    """Weights that were current when the action arrived."""
    outcome: Outcome | None = None
    state: Any = None
    """State of the environment after it, for `recovery = "state"`."""


@dataclass(frozen=True)
class Opened:
    """An episode that is ready for its next turn, or has failed."""

    observation: Observation | None
    """Observation of `reset`; None if it returned none, or failed."""
    recorded: tuple[SampledTurn, ...]
    """Turns after those of the response, which continues after the last of them."""
    failure: str | None
    """Reason why the episode cannot continue: "CAUSE: details", with a cause of `CAUSES`."""
