"""All groups that one engine generates: vLLM's requests in, finished groups out.

Imports vLLM: only engine.py does so, inside the actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import cast

from transformers import PreTrainedTokenizerBase
from vllm.inputs import TokensInput
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector

from megadapo.rollout.engine.episode import EpisodeResponse, EpisodeTexts
from megadapo.rollout.engine.in_flight import InFlightGroup, InFlightResponse
from megadapo.rollout.episodes.actor import HOST_NAME
from megadapo.rollout.types import EngineCounts, OpenGroup, StopReport
from megadapo.tokens.stops import without_end

POLL_S = 0.05
"""Pause between two checks of how many responses have ended."""


class Generation:
    """The groups in flight on one engine; lives in the actor's event loop."""

    def __init__(self, llm: AsyncLLM, *, returns_experts: bool = False) -> None:
        self._llm = llm
        self._returns_experts = returns_experts
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._groups: dict[int, InFlightGroup] = {}
        self._ended: list[InFlightGroup] = []
        self._error: BaseException | None = None
        self._closed = False
        self._wake, self._submitting = asyncio.Event(), asyncio.Lock()
        self._num_requests = self._num_tokens = 0
        self.num_ended = 0
        """Number of responses that have ended, as in `EngineCounts`."""

    @property
    def num_tokens(self) -> int:
        """Tokens generated since the engine started, those of unfinished responses included."""
        groups = self._groups.values()
        ended = self._num_tokens + sum(group.num_tokens for group in groups)
        running = (collector for group in groups for collector in group.collectors)
        return ended + sum(map(self._num_tokens_of, running))

    async def submit(self, groups: Sequence[OpenGroup], policy_version: int) -> None:
        """Start to generate; vLLM works on the first groups while the others are submitted."""
        async with self._submitting:
            started: list[InFlightGroup] = []
            try:
                for request in groups:
                    group = InFlightGroup(
                        request=request,
                        policy_version=policy_version,
                        add_request=self._add_request,
                        tokenizer=self._tokenizer,
                        vocab_size=self._llm.model_config.get_vocab_size(),
                        returns_experts=self._returns_experts,
                        new_response=self._new_episode if request.episode else InFlightResponse,
                    )
                    started.append(group)
                    await group.start()
            except BaseException:
                # none of the groups is in flight then
                await self._abort(started)
                raise
            for group in started:
                self._groups[group.request.key] = group
                self._tasks[group.request.key] = asyncio.create_task(self._follow(group))

    async def collect(
        self, max_wait_s: float, num_for_report: int
    ) -> tuple[tuple[OpenGroup, ...], EngineCounts]:
        """Wait until a group or `num_for_report` responses end, at most `max_wait_s` seconds.

        A response that waits for its environment counts as well, because its slot is free.

        Returns:
            The groups that have ended since the last call.
        """
        deadline = time.monotonic() + max_wait_s
        enough = self.num_ended + self._num_waiting + num_for_report
        while not self._ended and time.monotonic() < deadline:
            if self.num_ended + self._num_waiting >= enough:
                break
            if self._closed:
                break
            if self._error is not None:
                raise self._error
            if self._llm.errored:  # with no group in flight, no other call raises this
                raise self._llm.dead_error
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), POLL_S)
        ended, self._ended = self._ended, []
        # in a thread: decoding long responses takes a while, and vLLM's outputs must be read
        groups = await asyncio.to_thread(self._assemble, ended) if ended else ()
        return groups, self.counts()

    def counts(self) -> EngineCounts:
        """Return the work so far."""
        return EngineCounts(
            num_ended=self.num_ended, num_tokens=self.num_tokens, num_waiting=self._num_waiting
        )

    @property
    def _num_waiting(self) -> int:
        return sum(group.num_waiting for group in self._groups.values())

    def close(self) -> None:
        """Unblock pending `collect` calls."""
        # requests that end after this are cancelled on purpose
        self._closed = True
        self._wake.set()

    async def stop(self, keys: Collection[int], *, keep: bool) -> StopReport:
        """End groups and remove them; report the groups that `collect` has not returned."""
        async with self._submitting:
            chosen = [key for key in self._groups if key in keys]
            await self._abort([self._groups[key] for key in chosen])
        await asyncio.gather(*(self._tasks[key] for key in chosen))
        stopped = [group for group in self._ended if group.request.key in keys]
        self._ended = [group for group in self._ended if group not in stopped]
        if not keep:
            for group in stopped:
                group.drop()
        return StopReport(
            keys=tuple(group.request.key for group in stopped),
            unfinished=await asyncio.to_thread(self._assemble, stopped) if keep else (),
            num_tokens=sum(group.num_tokens for group in stopped),
        )

    @cached_property
    def _new_episode(self) -> Callable[..., InFlightResponse]:
        """The type of responses that the run's environments answer."""
        import ray

        host = ray.get_actor(HOST_NAME)
        return partial(EpisodeResponse, host=host, texts=EpisodeTexts(self._tokenizer))

    async def _abort(self, groups: Sequence[InFlightGroup]) -> None:
        """Have vLLM end every unfinished response and return its tokens."""
        for group in groups:
            group.stop()
        await self._end(collector.request_id for group in groups for collector in group.collectors)

    async def _add_request(
        self, group: InFlightGroup, prompt: TokensInput, params: SamplingParams
    ) -> RequestOutputCollector:
        self._num_requests += 1
        collector = await self._llm.add_request(
            str(self._num_requests), prompt, params, priority=group.request.priority
        )
        if group.is_stopped:  # during the submission
            await self._end([collector.request_id])
        return collector

    async def _end(self, request_ids: Iterable[str]) -> None:
        """Have vLLM's core end requests; their last outputs come from its scheduler."""
        # AsyncLLM.abort would end them here, without the tokens that the scheduler holds back
        await self._llm.engine_core.abort_requests_async([*request_ids])

    async def _follow(self, group: InFlightGroup) -> None:
        """Wait for a group and its branches."""
        try:
            num_seen = 0
            await self._finish(group, group.responses)
            while branches := group.next_branches(num_seen):
                num_seen = len(group.responses)
                await group.add_branches(branches)
                await self._finish(group, group.responses[num_seen:])
            group.seconds = time.monotonic() - group.submitted
            if not group.is_stopped:
                # with branches, an episode may be continued until all have ended
                group.drop()
            self._ended.append(group)
            self._num_tokens += group.num_tokens
        except Exception as error:
            # no caller awaits this task: the next report raises vLLM's error
            self._error = error
        finally:
            del self._groups[group.request.key], self._tasks[group.request.key]
            self._wake.set()

    async def _finish(self, group: InFlightGroup, responses: Sequence[InFlightResponse]) -> None:
        """Wait for the end of responses, and count the slots that no later response needs."""

        async def finish(response: InFlightResponse) -> None:
            await response.finish()
            group.num_running -= 1
            num_unasked = len(group.request.seeds) - len(group.responses)
            num_left = group.num_running + (0 if group.is_stopped else num_unasked)
            num_free = max(0, group.num_slots - num_left)
            group.num_slots -= num_free
            self.num_ended += num_free

        group.num_running += len(responses)
        await asyncio.gather(*map(finish, responses))

    def _num_tokens_of(self, collector: RequestOutputCollector) -> int:
        if isinstance(collector.output, RequestOutput):
            return len(collector.output.outputs[0].token_ids)
        state = self._llm.output_processor.request_states.get(collector.request_id)
        if state is None or state.detokenizer is None:
            return 0
        return state.detokenizer.num_output_tokens()

    def _assemble(self, groups: Sequence[InFlightGroup]) -> tuple[OpenGroup, ...]:
        """Return groups that have ended, with the arrays of their responses.

        Those without an unfinished response have texts, which take seconds if they are long.
        """
        answers = [
            replace(
                group.request,
                responses=tuple(response.response() for response in group.responses),
                seconds=group.seconds,
            )
            for group in groups
        ]
        texts = iter(
            self._tokenizer.batch_decode(
                [
                    without_end(response.token_ids.tolist(), group.settings.stop_ids)
                    for group in answers
                    if not group.is_unfinished
                    for response in group.responses
                ],
                skip_special_tokens=True,
                clean_up_tokenization_spaces=False,
            )
        )
        return tuple(
            group
            if group.is_unfinished
            else replace(
                group,
                responses=tuple(
                    replace(response, text=next(texts)) for response in group.responses
                ),
            )
            for group in answers
        )

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return cast(PreTrainedTokenizerBase, self._llm.get_tokenizer())
