"""The groups that one engine is working on, from vLLM's requests to whole responses.

Imports vLLM: only engine.py does so, inside the actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import numpy as np
from transformers import PreTrainedTokenizerBase
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector

from megadapo.errors import InfraError
from megadapo.rollout.requests import (
    EngineReport,
    GroupRequest,
    GroupResponse,
    LogprobTable,
    Response,
    SamplingSettings,
    StopReport,
    continued_seed,
    sampled_logprobs,
)

POLL_S = 0.05
"""Pause between two looks at how many responses have ended."""


@dataclass(eq=False)
class _Group:
    """A group in flight."""

    request: GroupRequest
    policy_version: int
    submitted: float
    parts: list[RequestOutputCollector | None] = field(default_factory=list)
    """One per seed; none where the response was finished before."""
    outputs: list[RequestOutput | None] = field(default_factory=list)
    """What the parts gave, once the group has ended."""
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens generated for it, once it has ended."""
        outputs = [output for output in self.outputs if output is not None]
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    async def end(self) -> None:
        """Wait for every part."""
        # read together: until then a part that has ended keeps what it got
        for part in self.parts:
            if part is not None:
                await part.ready.wait()
        self.outputs = [
            None if part is None else cast(RequestOutput, await part.get()) for part in self.parts
        ]
        self.seconds = time.monotonic() - self.submitted


class Generation:
    """Submits groups to vLLM and collects what comes; lives in the actor's event loop."""

    def __init__(self, llm: AsyncLLM, *, engine: int) -> None:
        self._llm = llm
        self._engine = engine
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._groups: dict[int, _Group] = {}
        self._ended: list[_Group] = []
        self._error: BaseException | None = None
        self._closed = False
        self._wake, self._submitting = asyncio.Event(), asyncio.Lock()
        self._num_submitted = self._num_requests = self._num_tokens = 0

    @property
    def num_ended(self) -> int:
        """Responses that have ended since the engine started, those that were stopped included."""
        return self._num_submitted - self._llm.get_num_unfinished_requests()

    @property
    def num_tokens(self) -> int:
        """Tokens generated since the engine started, those of unfinished responses included."""
        parts = [part for group in self._groups.values() for part in group.parts if part]
        return self._num_tokens + sum(map(self._num_tokens_of, parts))

    async def submit(self, groups: Sequence[GroupRequest], policy_version: int) -> None:
        """Begin to generate; vLLM starts with what it has while the rest is submitted."""
        async with self._submitting:
            before, started = self._num_submitted, []
            try:
                for request in groups:
                    group = _Group(request, policy_version, time.monotonic())
                    started.append(group)
                    await self._ask_all(group)
            except BaseException:
                # none of them is in flight then
                await self._abort(started)
                self._num_submitted = before
                raise
            for group in started:
                self._groups[group.request.key] = group
                self._tasks[group.request.key] = asyncio.create_task(self._follow(group))

    async def collect(self, max_wait_s: float, num_for_report: int) -> EngineReport:
        """Wait for the end of a group, or of so many responses, or for so many seconds."""
        deadline = time.monotonic() + max_wait_s
        enough = self.num_ended + num_for_report
        while not self._ended and self.num_ended < enough and time.monotonic() < deadline:
            if self._closed:
                break
            if self._error is not None:
                raise self._error
            if self._llm.errored:  # which nothing else tells while no group is in flight
                raise self._llm.dead_error
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), POLL_S)
        ended, self._ended = self._ended, []
        # long responses take a while to decode: vLLM's outputs must be read meanwhile
        groups = await asyncio.to_thread(self._assemble, ended) if ended else ()
        return self.report(groups)

    def report(self, groups: tuple[GroupResponse, ...] = ()) -> EngineReport:
        """What the driver is told, with groups that have ended."""
        return EngineReport(groups=groups, num_ended=self.num_ended, num_tokens=self.num_tokens)

    def close(self) -> None:
        """Whoever still waits for a report gets one: what ends from now on was meant to."""
        self._closed = True
        self._wake.set()

    async def stop(self, keys: Collection[int], *, keep: bool) -> StopReport:
        """End groups and forget them.

        A group that `collect` has taken is not among those that are reported.
        """
        async with self._submitting:
            chosen = [key for key in self._groups if key in keys]
            await self._abort([self._groups[key] for key in chosen])
        await asyncio.gather(*(self._tasks[key] for key in chosen))
        stopped = [group for group in self._ended if group.request.key in keys]
        self._ended = [group for group in self._ended if group not in stopped]
        return StopReport(
            keys=tuple(group.request.key for group in stopped),
            unfinished=await asyncio.to_thread(self._assemble, stopped) if keep else (),
            num_tokens=sum(group.num_tokens for group in stopped),
        )

    async def _ask_all(self, group: _Group) -> None:
        request = group.request
        begun = request.begun or (None,) * len(request.seeds)
        for seed, before in zip(request.seeds, begun, strict=True):
            group.parts.append(await self._ask(request, seed, before, group.policy_version))

    async def _abort(self, groups: Sequence[_Group]) -> None:
        """Have vLLM hand over what it has of every unfinished response."""
        parts = [part for group in groups for part in group.parts if part is not None]
        await self._llm.abort([part.request_id for part in parts], internal=True)

    async def _ask(
        self, group: GroupRequest, seed: int, begun: Response | None, policy_version: int
    ) -> RequestOutputCollector | None:
        """Submit one response, or what is left of it; none where nothing is."""
        self._num_submitted += 1
        if begun is not None and begun.finish_reason != "unfinished":
            return None
        before = begun.token_ids if begun is not None else np.empty(0, dtype=np.int32)
        self._num_requests += 1
        return await self._llm.add_request(
            str(self._num_requests),
            # what other weights computed must not be found in the cache
            tokens_input([*group.prompt_ids, *before.tolist()], cache_salt=str(policy_version)),
            _sampling_params(group.settings, continued_seed(seed, before), len(before)),
            priority=group.priority,
        )

    async def _follow(self, group: _Group) -> None:
        try:
            await group.end()
            self._ended.append(group)
            self._num_tokens += group.num_tokens
        except Exception as error:
            # nobody waits for this task: the next report raises what vLLM raised here
            self._error = error
        finally:
            del self._groups[group.request.key], self._tasks[group.request.key]
            self._wake.set()

    def _num_tokens_of(self, part: RequestOutputCollector) -> int:
        if isinstance(part.output, RequestOutput):
            return len(part.output.outputs[0].token_ids)
        state = self._llm.output_processor.request_states.get(part.request_id)
        if state is None or state.detokenizer is None:
            return 0
        return state.detokenizer.num_output_tokens()

    def _assemble(self, groups: Sequence[_Group]) -> tuple[GroupResponse, ...]:
        """Arrays and texts of groups that have ended."""
        drafts = [self._draft(group) for group in groups]
        texts = iter(self._decode([response.token_ids for one in drafts for response in one]))
        return tuple(
            GroupResponse(
                key=group.request.key,
                responses=tuple(replace(response, text=next(texts)) for response in draft),
                engine=self._engine,
                seconds=group.seconds,
            )
            for group, draft in zip(groups, drafts, strict=True)
        )

    def _draft(self, group: _Group) -> list[Response]:
        """The group's responses, with no text yet."""
        begun = group.request.begun or (None,) * len(group.outputs)
        return [
            _response(output, before, group.policy_version)
            for output, before in zip(group.outputs, begun, strict=True)
        ]

    def _decode(self, token_ids: Sequence[np.ndarray]) -> list[str]:
        tokenizer = cast(PreTrainedTokenizerBase, self._llm.get_tokenizer())
        return tokenizer.batch_decode(
            [ids.tolist() for ids in token_ids],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )


def _sampling_params(settings: SamplingSettings, seed: int, num_before: int) -> SamplingParams:
    return SamplingParams(
        temperature=settings.temperature,
        top_p=settings.top_p,
        max_tokens=settings.max_tokens - num_before,
        seed=seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _response(
    output: RequestOutput | None, begun: Response | None, policy_version: int
) -> Response:
    """A response without its text, which continues what was begun."""
    if output is None:
        assert begun is not None, "only a response that was finished before is not asked for"
        return begun
    completion = output.outputs[0]
    reason = "unfinished" if completion.finish_reason == "abort" else completion.finish_reason
    if reason not in ("stop", "length", "unfinished"):
        raise InfraError(f"vLLM ended a response with {completion.finish_reason!r}")
    table = cast(LogprobTable | None, completion.logprobs)  # flat_logprobs asked for it
    token_ids = np.asarray(completion.token_ids, dtype=np.int32)
    logprobs = sampled_logprobs(completion.token_ids, table)
    versions = np.full(len(token_ids), policy_version, dtype=np.int32)
    if begun is not None:
        token_ids = np.concatenate([begun.token_ids, token_ids])
        logprobs = np.concatenate([begun.logprobs, logprobs])
        versions = np.concatenate([begun.policy_versions, versions])
    return Response(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=cast(Literal["stop", "length", "unfinished"], reason),
        text="",
        policy_versions=versions,
    )
