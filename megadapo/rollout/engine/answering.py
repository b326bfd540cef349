"""One response under way, from vLLM's requests to arrays: each tool call ends one request.

Imports vLLM: only engine.py does so, inside the actor.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from transformers import PreTrainedTokenizerBase
from vllm.inputs import TokensInput, tokens_input
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.output_processor import RequestOutputCollector

from megadapo.algorithm.groups import Branch
from megadapo.data.policy_versions import NO_VERSION
from megadapo.errors import InfraError
from megadapo.rollout.engine.branching import normalized_entropy
from megadapo.rollout.tools import Tool
from megadapo.rollout.types import (
    FinishReason,
    GroupRequest,
    LogprobTable,
    Response,
    ToolCall,
    continued_seed,
    sampled_logprobs,
)

Ask = Callable[[TokensInput, SamplingParams], Awaitable[RequestOutputCollector]]
"""Submits a request to vLLM."""


@dataclass(frozen=True, kw_only=True)
class GroupContext:
    """What the responses of a group have in common."""

    group: GroupRequest
    policy_version: int
    ask: Ask
    tool: Tool | None
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    returns_experts: bool
    """Whether the engine hands over the experts of each token."""


@dataclass(frozen=True)
class _Piece:
    """Tokens that follow each other, of one request or of a tool."""

    token_ids: Sequence[int]
    logprobs: LogprobTable | np.ndarray | None
    """Of a request, as vLLM gave them or picked out of that."""
    policy_version: int


class Answer:
    """A response of a group, which may have been begun before."""

    def __init__(
        self,
        asker: GroupContext,
        seed: int,
        begun: Response | None,
        *,
        branch: Branch | None = None,
    ) -> None:
        """`begun`: what there is of it; of a branch its parent's tokens."""
        self.part: RequestOutputCollector | None = None
        """The request that is generated, if one is."""
        self.num_generated = 0
        """Tokens of requests that have ended."""
        self._asker, self._seed, self._begun, self._branch = asker, seed, begun, branch
        self._pieces: list[_Piece] = []
        begun_experts = None if begun is None else begun.experts
        self._experts: list[np.ndarray] = [] if begun_experts is None else [begun_experts]
        self._calls: list[ToolCall] = [] if begun is None else list(begun.calls)
        self._entropy = math.nan if begun is None else begun.entropy
        self._finish_reason: FinishReason = "unfinished" if begun is None else begun.finish_reason
        self._stopped = False

    async def ask(self) -> None:
        """Submit what is left of the response, if anything is."""
        if self._finish_reason != "unfinished" or self._stopped:
            return
        before = self._token_ids
        asker = self._asker
        prompt = tokens_input(
            [*asker.group.prompt_ids, *before],
            # what other weights computed must not be found in the cache
            cache_salt=str(asker.policy_version),
        )
        params = self._sampling_params(before)
        # those of tokens that are read again stay what they were
        params.routed_experts_prompt_start = self._num_routed
        self.part = await asker.ask(prompt, params)

    async def finish(self) -> None:
        """Wait for its end, and have the tool answer its calls."""
        while self.part is not None:
            # not taken before it has ended: until then the part keeps what it got
            await self.part.ready.wait()
            output = cast(RequestOutput, await self.part.get()).outputs[0]
            self.part = None
            self._take(output)
            await self.ask()

    def stop(self) -> None:
        """Let nothing more be asked for it."""
        self._stopped = True

    def response(self) -> Response:
        """What there is of it, with no text yet."""
        begun = self._begun
        if begun is not None and not self._pieces:
            return begun
        parts = [] if begun is None else [(begun.token_ids, begun.logprobs, begun.policy_versions)]
        parts += [_arrays(piece) for piece in self._pieces] or [_arrays(_Piece((), None, 0))]
        token_ids, logprobs, versions = map(np.concatenate, zip(*parts, strict=True))
        return Response(
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=self._finish_reason,
            text="",
            policy_versions=versions,
            calls=tuple(self._calls),
            entropy=self._entropy,
            branch=self._branch,
            experts=np.concatenate(self._experts) if self._experts else None,
        )

    @property
    def _num_routed(self) -> int:
        """Tokens of prompt and response whose experts are known, from the first one on."""
        return sum(map(len, self._experts))

    @property
    def _token_ids(self) -> list[int]:
        before = [] if self._begun is None else self._begun.token_ids.tolist()
        return [*before, *(token for piece in self._pieces for token in piece.token_ids)]

    def _take(self, output: CompletionOutput) -> None:
        """Put what a request gave to the response, and a tool's output behind it."""
        asker = self._asker
        if asker.returns_experts:
            self._take_experts(output)
        table = cast(LogprobTable | None, output.logprobs)  # flat_logprobs asked for it
        self._stopped |= output.finish_reason == "abort"
        logprobs: LogprobTable | np.ndarray | None = table
        if asker.group.settings.branching.is_on and table is not None:
            self._measure(table)
            # of every position's most probable tokens only the sampled one is needed from here on
            logprobs = sampled_logprobs(output.token_ids, table)
        self._pieces.append(_Piece(output.token_ids, logprobs, asker.policy_version))
        self.num_generated += len(output.token_ids)
        self._finish_reason = _finish_reason(output)
        if asker.tool is not None and isinstance(output.stop_reason, str):
            self._finish_reason = "unfinished"
            self._call(asker.tool)

    def _take_experts(self, output: CompletionOutput) -> None:
        """Put the experts of what the request read to those before; it did not read its end."""
        if not output.token_ids:
            return
        num_before = len(self._asker.group.prompt_ids) + len(self._token_ids)
        num_read = num_before + len(output.token_ids) - 1 - self._num_routed
        experts = output.routed_experts
        if experts is None or len(experts) != num_read:
            found = 0 if experts is None else len(experts)
            raise InfraError(f"vLLM gave the experts of {found} tokens, and read {num_read}")
        self._experts.append(experts)

    def _call(self, tool: Tool) -> None:
        """Ask the tool for what stands behind the response; without room for more it is over."""
        asker, token_ids = self._asker, self._token_ids
        tools, room = asker.group.settings.tools, self._room(token_ids)
        if room == 0:
            self._finish_reason = "length"
            return
        text = asker.tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        found = tool.step(cast(str, text))
        if found is not None:
            # no text that a tool puts out is a special token, such as that of the end
            ids = asker.tokenizer.encode(found, add_special_tokens=False, split_special_tokens=True)
            ids = ids[: min(tools.max_output_tokens, room)]
            self._pieces.append(_Piece(ids, None, NO_VERSION))
            self._calls.append(ToolCall(end=len(token_ids) + len(ids)))
            room -= len(ids)
        if room == 0:
            self._finish_reason = "length"

    def _measure(self, table: LogprobTable) -> None:
        """Keep the entropy of a request's first tokens where it is one to compare."""
        asker, num_before = self._asker, len(self._token_ids)
        num_tokens = asker.group.settings.branching.num_tokens
        entropy = normalized_entropy(table, num_tokens=num_tokens, vocab_size=asker.vocab_size)
        if num_before == 0:
            self._entropy = entropy
        elif self._calls and self._calls[-1].end == num_before:
            self._calls[-1] = ToolCall(end=num_before, entropy=entropy)

    def _room(self, token_ids: Sequence[int]) -> int:
        return self._asker.group.settings.max_tokens - len(token_ids)

    def _sampling_params(self, before: Sequence[int]) -> SamplingParams:
        settings, tool = self._asker.group.settings, self._asker.tool
        may_call = tool is not None and len(self._calls) < settings.tools.max_calls
        branching = settings.branching
        return SamplingParams(
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_tokens=self._room(before),
            seed=continued_seed(self._seed, np.array(before, dtype=np.int32)),
            logprobs=branching.top_logprobs if branching.is_on else 0,
            flat_logprobs=True,
            detokenize=may_call,
            stop=list(tool.stop_strings) if tool is not None and may_call else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
            # it is this request's alone: vLLM need not copy all that is in it
            skip_clone=True,
        )


def beginning(response: Response, num_tokens: int, *, num_prompt: int) -> Response:
    """The first tokens of a response, and the calls among them.

    `num_prompt`: tokens before it. Its last token is read anew.
    """
    experts = response.experts
    return Response(
        token_ids=response.token_ids[:num_tokens],
        logprobs=response.logprobs[:num_tokens],
        finish_reason="unfinished",
        text="",
        policy_versions=response.policy_versions[:num_tokens],
        calls=tuple(call for call in response.calls if call.end <= num_tokens),
        entropy=response.entropy,
        experts=None if experts is None else experts[: num_prompt + num_tokens - 1],
    )


def _finish_reason(output: CompletionOutput) -> FinishReason:
    match output.finish_reason:
        case "stop":
            return "stop"
        case "length":
            return "length"
        case "abort":
            return "unfinished"
    raise InfraError(f"vLLM ended a response with {output.finish_reason!r}")


def _arrays(piece: _Piece) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, log-probs and policy versions."""
    token_ids = np.asarray(piece.token_ids, dtype=np.int32)
    logprobs = piece.logprobs
    if not isinstance(logprobs, np.ndarray):
        logprobs = sampled_logprobs(piece.token_ids, logprobs)
    return token_ids, logprobs, np.full(len(token_ids), piece.policy_version, dtype=np.int32)
