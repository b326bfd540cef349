"""The groups and responses that an engine generates, from vLLM's requests to arrays.

A group may branch after calls at which the policy is less certain than at the start: ARPO (arXiv
2507.19849), Algorithm 1 with equations 3 to 5. These decisions depend on finished responses only,
not on the engines' number, speed or order.

Imports vLLM: only engine.py does so, inside the actor.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
from transformers import PreTrainedTokenizerBase
from vllm.inputs import TokensInput, tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.output_processor import RequestOutputCollector

from megadapo.algorithm.groups import Branch
from megadapo.data.group import Failure, FinishReason, Response, Turn
from megadapo.errors import InfraError
from megadapo.rollout.config import BranchingConfig
from megadapo.rollout.types import OpenGroup, continued_seed, sampled_logprobs

TOP_LOGPROBS = 10
"""Most probable tokens of a position over which its entropy is summed."""
ALPHA = 0.5
"""Probability of a branch if the entropy has not risen since the response's start."""
BETA = 0.2
"""Increase of that probability per unit of normalized entropy."""
THRESHOLD = 0.5
"""Probability above which a response branches (tau). These three values are those of the paper and
of the authors' code."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one request, or of an environment."""

    token_ids: Sequence[int]
    logprobs: FlatLogprobs | np.ndarray | None
    """vLLM's table, or the log-probs of the sampled tokens."""
    policy_version: int


class InFlightResponse:
    """A response of a group in flight.

    Args:
        prefix: the tokens that exist already: those of a stopped response, or of a branch's parent.
        stop_at: number of tokens at which it stops as unfinished.
    """

    def __init__(
        self,
        group: InFlightGroup,
        seed: int,
        prefix: Response | None,
        *,
        branch: Branch | None = None,
        stop_at: int | None = None,
    ) -> None:
        self.collector: RequestOutputCollector | None = None
        """The running request."""
        self.num_generated = 0
        """Number of tokens of finished requests."""
        self.is_waiting = False
        """Whether it waits for its environment."""
        self._group, self._seed, self._prefix, self._branch = group, seed, prefix, branch
        self._stop_at = stop_at
        self._segments: list[Segment] = []
        self._stopping = asyncio.Event()
        experts = None if prefix is None else prefix.experts
        self._experts: list[np.ndarray] = [] if experts is None else [experts]
        self._turns: list[Turn] = [] if prefix is None else list(prefix.turns)
        self._entropy = math.nan if prefix is None else prefix.entropy
        self._failure: Failure | None = None
        self._finish_reason: FinishReason = "unfinished"
        self._stop_reason: int | str | None = None
        """The token or text that ended the last request."""
        if prefix is not None:
            self._finish_reason = prefix.finish_reason

    @property
    def is_stopped(self) -> bool:
        """Whether no further request is submitted."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Submit no further request."""
        self._stopping.set()

    def drop(self) -> None:
        """Free what the response holds outside of the engine."""

    async def submit(self) -> None:
        """Submit the rest of the response, if it is unfinished."""
        if self._finish_reason != "unfinished" or self.is_stopped:
            return
        before, group = self._token_ids, self._group
        if self._is_stopped_early(before):
            return
        prompt = tokens_input(
            [*group.request.prompt_ids, *before],
            # the cache must not return keys and values that other weights computed
            cache_salt=str(group.policy_version),
        )
        params = self._sampling_params(before)
        # tokens that are read again keep their first experts
        params.routed_experts_prompt_start = self._num_routed
        self.collector = await group.add_request(group, prompt, params)

    async def finish(self) -> None:
        """Wait for the end of the response."""
        while self.collector is not None:
            # read only after its end: until then the collector accumulates the output
            await self.collector.ready.wait()
            output = cast(RequestOutput, await self.collector.get()).outputs[0]
            self.collector = None
            self._add_output(output)
            await self._after_output()
            await self.submit()

    async def _after_output(self) -> None:
        """Do what must follow the output of a request before the next one."""

    def response(self) -> Response:
        """Return the response so far, without its text."""
        prefix = self._prefix
        if prefix is not None and not self._segments and self._failure is None:
            return prefix
        parts = [_arrays(segment) for segment in self._segments] or [_arrays(Segment((), None, 0))]
        if prefix is not None:
            parts.insert(0, (prefix.token_ids, prefix.logprobs, prefix.policy_versions))
        token_ids, logprobs, versions = map(np.concatenate, zip(*parts, strict=True))
        return Response(
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=self._finish_reason,
            text="",
            policy_versions=versions,
            turns=tuple(self._turns),
            entropy=self._entropy,
            branch=self._branch,
            experts=np.concatenate(self._experts) if self._experts else None,
            failure=self._failure,
        )

    @property
    def _num_routed(self) -> int:
        """Number of leading tokens of prompt and response with known experts."""
        return sum(map(len, self._experts))

    @property
    def _token_ids(self) -> list[int]:
        before = [] if self._prefix is None else self._prefix.token_ids.tolist()
        return [*before, *(token for segment in self._segments for token in segment.token_ids)]

    def _add_output(self, output: CompletionOutput) -> None:
        group = self._group
        if group.returns_experts:
            self._add_experts(output)
        table = cast(FlatLogprobs | None, output.logprobs)  # because of flat_logprobs
        if output.finish_reason == "abort":
            self.stop()
        logprobs: FlatLogprobs | np.ndarray | None = table
        if group.request.settings.branching.is_on and table is not None:
            self._measure_entropy(table)
            # the other probable tokens of each position are not needed any more
            logprobs = sampled_logprobs(output.token_ids, table)
        self._segments.append(Segment(output.token_ids, logprobs, group.policy_version))
        self.num_generated += len(output.token_ids)
        self._finish_reason, self._stop_reason = _finish_reason(output), output.stop_reason
        if self._finish_reason == "length" and self._is_stopped_early(self._token_ids):
            self._finish_reason = "unfinished"

    def _add_experts(self, output: CompletionOutput) -> None:
        """Add the experts of all tokens that the request read, which excludes its last one."""
        if not output.token_ids:
            return
        num_before = len(self._group.request.prompt_ids) + len(self._token_ids)
        num_read = num_before + len(output.token_ids) - 1 - self._num_routed
        experts = output.routed_experts
        if experts is None or len(experts) != num_read:
            found = 0 if experts is None else len(experts)
            raise InfraError(f"vLLM returned the experts of {found} tokens, but read {num_read}")
        self._experts.append(experts)

    def _measure_entropy(self, table: FlatLogprobs) -> None:
        """Record the entropy of the first tokens of the response or after a call."""
        group, num_before = self._group, len(self._token_ids)
        num_tokens = group.request.settings.branching.num_tokens
        entropy = normalized_entropy(table, num_tokens=num_tokens, vocab_size=group.vocab_size)
        if num_before == 0:
            self._entropy = entropy
        elif self._turns and self._turns[-1].end == num_before:
            self._turns[-1] = replace(self._turns[-1], entropy=entropy)

    def _num_left(self, token_ids: Sequence[int]) -> int:
        """Return the number of tokens that the response may still have."""
        return self._group.request.settings.max_tokens - len(token_ids)

    @property
    def _stop_texts(self) -> Sequence[str]:
        """Texts that end a request."""
        return ()

    def _num_left_of_turn(self, token_ids: Sequence[int]) -> int:
        """Return the number of tokens that may still be generated in this turn."""
        return self._num_left(token_ids)

    def _is_stopped_early(self, token_ids: Sequence[int]) -> bool:
        """Return whether the response is at its `stop_at`, although it may have further tokens."""
        is_there = self._stop_at is not None and len(token_ids) >= self._stop_at
        return is_there and self._num_left_of_turn(token_ids) > 0

    def _sampling_params(self, before: Sequence[int]) -> SamplingParams:
        settings = self._group.request.settings
        num_left = self._num_left_of_turn(before)
        if self._stop_at is not None:
            num_left = min(num_left, self._stop_at - len(before))
        stop_texts = list(self._stop_texts)
        return SamplingParams(
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_tokens=num_left,
            seed=continued_seed(self._seed, np.array(before, dtype=np.int32)),
            logprobs=TOP_LOGPROBS if settings.branching.is_on else 0,
            flat_logprobs=True,
            detokenize=bool(stop_texts),
            stop=stop_texts or None,
            # a stop text may have the name of a control token
            skip_special_tokens=False,
            stop_token_ids=list(settings.stop_ids),
            output_kind=RequestOutputKind.FINAL_ONLY,
            # no other request uses this object, so vLLM need not copy it
            skip_clone=True,
        )


@dataclass(eq=False, kw_only=True)
class InFlightGroup:
    """A group in flight, with everything that its responses share."""

    request: OpenGroup
    policy_version: int
    add_request: Callable[
        [InFlightGroup, TokensInput, SamplingParams], Awaitable[RequestOutputCollector]
    ]
    """Function that submits a request of the group to vLLM."""
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    returns_experts: bool
    """Whether the engine returns the experts of each token."""
    new_response: Callable[..., InFlightResponse] = InFlightResponse
    """Makes a response, with the arguments of `InFlightResponse`."""
    responses: list[InFlightResponse] = field(default_factory=list)
    """One response per seed; branches are added later."""
    num_slots: int = field(init=False)
    """Number of responses that may still run at the same time."""
    num_running: int = 0
    is_stopped: bool = False
    submitted: float = field(default_factory=time.monotonic)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.num_slots = self.request.num_at_once

    @property
    def num_tokens(self) -> int:
        """Number of tokens that finished requests have generated."""
        return sum(response.num_generated for response in self.responses)

    @property
    def collectors(self) -> list[RequestOutputCollector]:
        """The vLLM requests of the group that are running."""
        return [response.collector for response in self.responses if response.collector is not None]

    @property
    def num_waiting(self) -> int:
        """Number of responses that wait for their environment."""
        return sum(response.is_waiting for response in self.responses)

    def stop(self) -> None:
        """Submit no further requests."""
        self.is_stopped = True
        for response in self.responses:
            response.stop()

    def drop(self) -> None:
        """End the episodes of responses that are not wanted any more."""
        for response in self.responses:
            response.drop()

    async def start(self) -> None:
        """Submit the first responses: new ones, or the rest of stopped ones."""
        request = self.request
        prefixes = request.responses or (None,) * len(request.seeds)
        for prefix in prefixes[: request.num_at_once]:
            await self._add(prefix)

    async def add_branches(self, branches: Sequence[Branch | None]) -> None:
        """Submit further responses; None: a response that starts at the prompt."""
        for branch in branches:
            prefix = None
            if branch is not None:
                parent = self.responses[branch.parent].response()
                num_prompt = len(self.request.prompt_ids)
                prefix = response_prefix(parent, branch.num_tokens, num_prompt=num_prompt)
            await self._add(prefix, branch)

    def next_branches(self, num_seen: int) -> list[Branch | None]:
        """Return where the next responses start, None for the prompt; empty if it is complete.

        An earlier call has considered the first `num_seen` responses.
        """
        request = self.request
        num_left = len(request.seeds) - len(self.responses)
        if self.is_stopped or not num_left:
            return []
        branches = choose_branches(
            [response.response() for response in self.responses],
            request.seeds,
            request.settings.branching,
            num_seen=num_seen,
            num_left=num_left,
        )
        return [*branches] or [None] * num_left

    async def _add(self, prefix: Response | None, branch: Branch | None = None) -> None:
        number, request = len(self.responses), self.request
        stop_at = request.stop_at_tokens[number] if request.stop_at_tokens else None
        response = self.new_response(
            self, request.seeds[number], prefix, branch=branch, stop_at=stop_at
        )
        self.responses.append(response)
        await response.submit()


def _finish_reason(output: CompletionOutput) -> FinishReason:
    match output.finish_reason:
        case "stop":
            return "stop"
        case "length":
            return "length"
        case "abort":
            return "unfinished"
    raise InfraError(f"vLLM ended a response with {output.finish_reason!r}")


def _arrays(segment: Segment) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return token ids, log-probs and policy versions."""
    token_ids = np.asarray(segment.token_ids, dtype=np.int32)
    logprobs = segment.logprobs
    if not isinstance(logprobs, np.ndarray):
        logprobs = sampled_logprobs(segment.token_ids, logprobs)
    return token_ids, logprobs, np.full(len(token_ids), segment.policy_version, dtype=np.int32)


def normalized_entropy(table: FlatLogprobs, *, num_tokens: int, vocab_size: int) -> float:
    """Return the mean entropy of the first positions divided by log V; NaN without positions.

    The sum runs over a position's most probable tokens, so it is at most the full entropy.

    Args:
        table: at every position the sampled token, then the most probable ones.
        num_tokens: largest number of positions.
        vocab_size: V.
    """
    bounds = list(zip(table.start_indices, table.end_indices, strict=True))[:num_tokens]
    if not bounds:
        return math.nan
    total = 0.0
    for start, end in bounds:
        logprobs = np.array(table.logprobs[start + 1 : end], dtype=np.float64)
        probabilities = np.exp(logprobs)
        # 0 log 0 is 0
        total -= float((probabilities * np.where(probabilities > 0, logprobs, 0.0)).sum())
    return total / len(bounds) / math.log(vocab_size)


def choose_branches(
    responses: Sequence[Response],
    seeds: Sequence[int],
    config: BranchingConfig,
    *,
    num_seen: int,
    num_left: int,
) -> list[Branch]:
    """Return the points at which a group's next responses branch off the existing ones.

    The first calls of all responses come first, then the second ones, and so on.

    Args:
        responses: finished responses.
        seeds: seeds of the responses, for draws.
        num_seen: number of leading responses that an earlier call has considered.
        num_left: number of responses that the group may still have.

    Returns:
        One branch per new response, at most `num_left`.
    """
    points = sorted(
        (turn, index, call.end)
        for index, response in enumerate(responses[num_seen:], start=num_seen)
        for turn, call in enumerate(response.turns)
        if call.is_call
        and call.end > (response.branch.num_tokens if response.branch else 0)
        and _has_branch(call.entropy - response.entropy, seeds[index], call.end, config)
    )
    branches = [Branch(parent=index, num_tokens=end) for _, index, end in points]
    return [branch for branch in branches for _ in range(config.beam_size - 1)][:num_left]


def response_prefix(response: Response, num_tokens: int, *, num_prompt: int) -> Response:
    """Return the first tokens of a response, with the turns among them.

    The last token has no experts yet: the request that continues the prefix reads it.

    Args:
        num_prompt: number of prompt tokens before the response.
    """
    experts = response.experts
    return Response(
        token_ids=response.token_ids[:num_tokens],
        logprobs=response.logprobs[:num_tokens],
        finish_reason="unfinished",
        text="",
        policy_versions=response.policy_versions[:num_tokens],
        turns=tuple(call for call in response.turns if call.end <= num_tokens),
        entropy=response.entropy,
        experts=None if experts is None else experts[: num_prompt + num_tokens - 1],
    )


def _has_branch(rise: float, seed: int, end: int, config: BranchingConfig) -> bool:
    # if an entropy was not measured, the rise is NaN and no comparison holds
    if config.decision == "threshold":
        return ALPHA + BETA * rise > THRESHOLD
    # the authors' beta is for entropies summed over the positions. A mean times their number is
    # that sum, and after a call with fewer tokens it does not fall with their number
    probability = ALPHA + BETA * config.num_tokens * rise
    digest = hashlib.sha256(f"{seed}/branch/{end}".encode()).digest()
    return probability > int.from_bytes(digest[:8], "little") / 2.0**64
