"""The groups that one engine is working on, from vLLM's requests to whole responses.

Imports vLLM: only engine.py does so, inside the actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import numpy as np
from transformers import PreTrainedTokenizerBase
from vllm.inputs import TokensInput
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector

from megadapo.algorithm.groups import Branch
from megadapo.rollout.calculator import Calculator
from megadapo.rollout.engine.answering import Answer, GroupContext, beginning
from megadapo.rollout.engine.branching import choose_branches
from megadapo.rollout.tools import Mark, Tool, ToolsConfig
from megadapo.rollout.types import (
    EngineReport,
    GroupRequest,
    GroupResponse,
    Response,
    StopReport,
)

POLL_S = 0.05
"""Pause between two looks at how many responses have ended."""


TOOLS: dict[str, type[Tool]] = {"calculator": Calculator, "mark": Mark}
"""By their name in rollout.tools.tool."""


@dataclass(eq=False)
class _Group:
    """A group in flight."""

    request: GroupRequest
    submitted: float
    answers: list[Answer] = field(default_factory=list)
    """One per seed that was asked for; those of a group that branches come later."""
    num_running: int = 0
    num_places: int = 0
    """Responses that may still run at the same time."""
    is_stopped: bool = False
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens generated for it by requests that have ended."""
        return sum(answer.num_generated for answer in self.answers)

    def stop(self) -> None:
        """Let nothing more be asked for it."""
        self.is_stopped = True
        for answer in self.answers:
            answer.stop()

    def next_branches(self, num_seen: int) -> list[Branch | None]:
        """Where its next responses begin, None at the prompt; nothing where it is complete.

        Args:
            num_seen: responses that were looked at before.
        """
        request = self.request
        num_left = len(request.seeds) - len(self.answers)
        if self.is_stopped or not num_left:
            return []
        branches = choose_branches(
            [answer.response() for answer in self.answers],
            request.seeds,
            request.settings.branching,
            num_seen=num_seen,
            num_left=num_left,
        )
        return [*branches] or [None] * num_left


class Generation:
    """Submits groups to vLLM and collects what comes; lives in the actor's event loop."""

    def __init__(self, llm: AsyncLLM, *, engine: int, returns_experts: bool = False) -> None:
        self._llm = llm
        self._engine = engine
        self._returns_experts = returns_experts
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._groups: dict[int, _Group] = {}
        self._ended: list[_Group] = []
        self._error: BaseException | None = None
        self._closed = False
        self._wake, self._submitting = asyncio.Event(), asyncio.Lock()
        self._num_requests = self._num_tokens = 0
        self._tools: dict[ToolsConfig, Tool] = {}
        self.num_ended = 0
        """Responses that have ended since the engine started, those that were stopped included;
        of a group that branches those after which another one of its responses takes no place."""

    @property
    def num_tokens(self) -> int:
        """Tokens generated since the engine started, those of unfinished responses included."""
        groups = self._groups.values()
        parts = [answer.part for group in groups for answer in group.answers if answer.part]
        ended = self._num_tokens + sum(group.num_tokens for group in groups)
        return ended + sum(map(self._num_tokens_of, parts))

    async def submit(self, groups: Sequence[GroupRequest], policy_version: int) -> None:
        """Begin to generate; vLLM starts with what it has while the rest is submitted."""
        async with self._submitting:
            started: list[tuple[_Group, GroupContext]] = []
            try:
                for request in groups:
                    group = _Group(request, time.monotonic(), num_places=request.num_at_once)
                    asker = self._asker(group, policy_version)
                    started.append((group, asker))
                    await self._begin(group, asker)
            except BaseException:
                # none of them is in flight then
                await self._abort([group for group, _ in started])
                raise
            for group, asker in started:
                self._groups[group.request.key] = group
                self._tasks[group.request.key] = asyncio.create_task(self._follow(group, asker))

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
        for tool in self._tools.values():
            tool.stop()

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

    def _asker(self, group: _Group, policy_version: int) -> GroupContext:
        """What the responses of a group are asked for with."""
        return GroupContext(
            group=group.request,
            policy_version=policy_version,
            ask=partial(self._ask, group),
            tool=self._tool(group.request.settings.tools),
            tokenizer=self._tokenizer,
            vocab_size=self._llm.model_config.get_vocab_size(),
            returns_experts=self._returns_experts,
        )

    def _tool(self, config: ToolsConfig) -> Tool | None:
        """The tool of a configuration, started when it is first needed."""
        if config.tool is not None and config not in self._tools:
            self._tools[config] = TOOLS[config.tool](config)
            self._tools[config].start()
        return self._tools.get(config)

    async def _begin(self, group: _Group, asker: GroupContext) -> None:
        """Ask for the responses that begin at the prompt, or go on where they were stopped."""
        request = group.request
        begun = request.begun or (None,) * len(request.seeds)
        for seed, before in list(zip(request.seeds, begun, strict=True))[: request.num_at_once]:
            group.answers.append(Answer(asker, seed, before))
            await group.answers[-1].ask()

    async def _branch(
        self, group: _Group, asker: GroupContext, branches: Sequence[Branch | None]
    ) -> None:
        """Ask for more responses of a group, some of which begin in the middle of others."""
        for branch in branches:
            seed, begun = group.request.seeds[len(group.answers)], None
            if branch is not None:
                parent = group.answers[branch.parent].response()
                begun = beginning(
                    parent, branch.num_tokens, num_prompt=len(group.request.prompt_ids)
                )
            group.answers.append(Answer(asker, seed, begun, branch=branch))
            await group.answers[-1].ask()

    async def _abort(self, groups: Sequence[_Group]) -> None:
        """Have vLLM hand over what it has of every unfinished response."""
        for group in groups:
            group.stop()
        parts = [answer.part for group in groups for answer in group.answers if answer.part]
        await self._llm.abort([part.request_id for part in parts], internal=True)

    async def _ask(
        self, group: _Group, prompt: TokensInput, params: SamplingParams
    ) -> RequestOutputCollector:
        """Submit a request of a group."""
        self._num_requests += 1
        part = await self._llm.add_request(
            str(self._num_requests), prompt, params, priority=group.request.priority
        )
        if group.is_stopped:  # while it was submitted
            await self._llm.abort([part.request_id], internal=True)
        return part

    async def _follow(self, group: _Group, asker: GroupContext) -> None:
        try:
            num_seen = 0
            await self._finish(group, group.answers)
            while branches := group.next_branches(num_seen):
                num_seen = len(group.answers)
                await self._branch(group, asker, branches)
                await self._finish(group, group.answers[num_seen:])
            group.seconds = time.monotonic() - group.submitted
            self._ended.append(group)
            self._num_tokens += group.num_tokens
        except Exception as error:
            # nobody waits for this task: the next report raises what vLLM raised here
            self._error = error
        finally:
            del self._groups[group.request.key], self._tasks[group.request.key]
            self._wake.set()

    async def _finish(self, group: _Group, answers: Sequence[Answer]) -> None:
        """Wait for the end of responses, and count the places that they leave for good."""

        async def finish(answer: Answer) -> None:
            await answer.finish()
            group.num_running -= 1
            num_unasked = len(group.request.seeds) - len(group.answers)
            num_left = group.num_running + (0 if group.is_stopped else num_unasked)
            num_free = max(0, group.num_places - num_left)
            group.num_places -= num_free
            self.num_ended += num_free

        group.num_running += len(answers)
        await asyncio.gather(*map(finish, answers))

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
        return [answer.response() for answer in group.answers]

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return cast(PreTrainedTokenizerBase, self._llm.get_tokenizer())

    def _decode(self, token_ids: Sequence[np.ndarray]) -> list[str]:
        return self._tokenizer.batch_decode(
            [ids.tolist() for ids in token_ids],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
