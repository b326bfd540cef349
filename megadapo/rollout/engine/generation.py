"""All groups that one engine generates: vLLM's requests in, finished groups out.

A response whose turns an environment answers has one request per turn.

Imports vLLM: only engine.py does so, inside the actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import numpy as np
from transformers import PreTrainedTokenizerBase
from vllm.inputs import TokensInput
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector

from megadapo.data.group import CUT_MESSAGES, NO_VERSION, Failure, Response, Turn
from megadapo.errors import ConfigError, DataError
from megadapo.rollout.engine.episode import EpisodeClient, RemoteEpisode, sampled_of
from megadapo.rollout.engine.in_flight import InFlightGroup, InFlightResponse, Segment
from megadapo.rollout.episodes.actor import HOST_NAME
from megadapo.rollout.types import EngineCounts, EpisodeRequest, OpenGroup, Outcome, StopReport
from megadapo.tokens.stops import without_end

T = TypeVar("T")

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
        self._episodes: EpisodeClient | None = None
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
                    started.append(self._in_flight(request, policy_version))
                    await started[-1].start()
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

    def _in_flight(self, request: OpenGroup, policy_version: int) -> InFlightGroup:
        if request.episode is not None and self._episodes is None:
            import ray

            self._episodes = EpisodeClient(self._tokenizer, ray.get_actor(HOST_NAME))
        return InFlightGroup(
            request=request,
            policy_version=policy_version,
            add_request=self._add_request,
            tokenizer=self._tokenizer,
            vocab_size=self._llm.model_config.get_vocab_size(),
            returns_experts=self._returns_experts,
            episodes=self._episodes,
            response_type=InFlightResponse if request.episode is None else EpisodeResponse,
        )

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


class EpisodeResponse(InFlightResponse):
    """A response in flight that is an episode of an environment.

    While its environment works, it has no request, and so no slot of the engine.
    """

    _episode: RemoteEpisode | None = None

    async def submit(self) -> None:
        """Submit the rest of the response, if its episode is open."""
        if self._episode is not None:
            await super().submit()

    async def finish(self) -> None:
        """Play the episode until it has ended or the response is stopped."""
        if self._finish_reason == "unfinished" and not self.is_stopped:
            await self._open()
            await self.submit()
        await super().finish()
        # a response without an action starts again, under another policy version
        has_ended = self._finish_reason != "unfinished" or not self.response().is_sampled.any()
        if has_ended and not self._group.request.settings.branching.is_on:
            self.drop()

    def drop(self) -> None:
        """End the episode of a response that is not wanted any more."""
        if self._episode is not None:
            self._episode.close()
            self._episode = None

    async def _after_output(self) -> None:
        # the end of a turn is not the end of the response
        if self._finish_reason != "stop" or not self._may_act:
            return
        self._finish_reason = "unfinished"
        by_rest = isinstance(self._stop_reason, str) and self._stop_reason not in self._request.stop
        if not by_rest or self._ends_turn(self._turn_ids):
            await self._ask()
        elif self._num_left_of_turn(self._token_ids) == 0:
            self._finish_reason = "length"

    @property
    def _request(self) -> EpisodeRequest:
        request = self._group.request.episode
        assert request is not None
        return request

    @property
    def _ends(self) -> set[int]:
        """Tokens that end a turn."""
        return {*self._group.request.settings.stop_ids, self._group.tokenizer.eos_token_id}

    @property
    def _num_calls(self) -> int:
        return sum(turn.is_call for turn in self._turns)

    @property
    def _may_act(self) -> bool:
        """Whether the environment may be given another action."""
        return self._num_calls < self._request.max_turns

    @property
    def _stop_texts(self) -> Sequence[str]:
        """Texts that end a turn, and the rest of one that the response was stopped in.

        A rest may occur elsewhere too; the response then continues.
        """
        stop = self._request.stop
        if not self._may_act or not stop:
            return ()
        text = cast(str, self._group.tokenizer.decode(self._turn_ids))
        rests = [one[n:] for one in stop for n in range(1, len(one)) if text.endswith(one[:n])]
        return [*stop, *rests]

    @property
    def _turn_ids(self) -> list[int]:
        """The tokens of the current turn so far."""
        return self._token_ids[self._turns[-1].end if self._turns else 0 :]

    def _num_left_of_turn(self, token_ids: Sequence[int]) -> int:
        num_left, limit = self._num_left(token_ids), self._request.max_turn_tokens
        if limit is None:
            return num_left
        start = max((turn.end for turn in self._turns if turn.is_call), default=0)
        return min(num_left, start + limit - len(token_ids))

    async def _open(self) -> None:
        """Begin the episode, or bring it to the last turn that was answered before."""
        request, client = self._request, self._group.episodes
        assert client is not None
        before = self.response()
        versions = before.policy_versions[before.is_sampled]
        version = int(versions[0]) if len(versions) else self._group.policy_version
        branch, seeds = self._branch, self._group.request.seeds
        parent = None if branch is None else seeds[branch.parent]
        prompt_ids = self._group.request.prompt_ids
        self._episode = RemoteEpisode(client, request, prompt_ids, self._seed, version, parent)
        opened = await self._unless_stopped(self._episode.open(before, self._ends))
        if opened is None:
            return
        if opened.failure is not None:
            self._fail(opened.failure)
            return
        start = self._turns[-1].end if self._turns else 0
        current = before.token_ids[start:]
        if not len(before.token_ids) and opened.observation is not None:
            self._observe(Outcome(opened.observation, None, 0.0), [])
        for turn in opened.recorded:
            # a turn that this response has sampled is requested again instead
            if len(current) or self._finish_reason != "unfinished":
                break
            sampled = sampled_of(turn.sampled)
            length = len(self._token_ids) + len(sampled.token_ids)
            if self._stop_at is not None and length > self._stop_at:
                break
            self._segments += _segments(sampled)
            self._observe(turn.outcome, sampled.token_ids.tolist())
        if len(current) and self._may_act and self._ends_turn(current.tolist()):
            await self._ask()

    def _ends_turn(self, token_ids: Sequence[int]) -> bool:
        """Return whether the tokens of a turn are complete."""
        if token_ids[-1] in self._ends:
            return True
        text = cast(str, self._group.tokenizer.decode(list(token_ids)))
        return any(one in text for one in self._request.stop)

    async def _ask(self) -> None:
        """Have the environment answer the turn that has just ended.

        If the response is stopped meanwhile, the host finishes the turn for a later request.
        """
        assert self._episode is not None
        response = self.response()
        start = self._turns[-1].end if self._turns else 0
        ids = response.token_ids[start:].tolist()
        has_end = ids[-1] in self._ends
        sampled = Response(
            token_ids=response.token_ids[start:],
            logprobs=response.logprobs[start:],
            finish_reason="unfinished",
            text="",
            policy_versions=response.policy_versions[start:],
        )
        number = len(response.actions)
        pending = self._episode.step(number, sampled, len(ids) - has_end)
        outcome = await self._unless_stopped(pending)
        if outcome is None:
            return
        self._observe(outcome, ids)

    def _observe(self, outcome: Outcome, turn_ids: Sequence[int]) -> None:
        """Append the answer to a turn; end the response if the episode is over."""
        assert self._episode is not None
        observation, num_cut = outcome.observation, 0
        ids: list[int] = []
        if observation is None:
            self._fail(outcome.failure or "")
            return
        is_call = observation.is_call and not observation.done and bool(turn_ids)
        num_calls = self._num_calls + is_call
        is_last = num_calls >= self._request.max_turns and observation.text is None
        # the model reads nothing after its last turn
        if not observation.done and not is_last:
            if self._stop_at is not None and len(self._token_ids) >= self._stop_at:
                # the run that is repeated was stopped before this answer
                return
            if observation.text is not None and {*turn_ids[-1:]} & self._ends:
                self._fail(
                    "wrong result: an observation has text, but the model has ended its turn: "
                    "answer a turn without a text of `stop` with messages, or end the episode"
                )
                return
            try:
                ids, num_cut = self._episode.observation_ids(observation, turn_ids)
                ids = ids[: self._num_left(self._token_ids)]
            except (ConfigError, DataError) as error:
                self._fail(f"wrong result: {error}")
                return
        self._segments.append(Segment(ids, None, NO_VERSION))
        end = len(self._token_ids)
        cut = [(CUT_MESSAGES, float(num_cut))] if num_cut else []
        self._turns.append(
            Turn(
                end=end,
                reward=observation.reward,
                seconds=outcome.seconds,
                is_call=is_call,
                metrics=(*observation.metrics.items(), *cut),
            )
        )
        self._finish_reason = "unfinished"
        if observation.done:
            self._finish_reason = "stop"
        elif is_last:
            self._finish_reason = "max_turns"
        elif self._num_left_of_turn(self._token_ids) == 0:
            self._finish_reason = "length"

    def _fail(self, reason: str) -> None:
        """End the response without a score."""
        assert self._episode is not None
        self._finish_reason = "failed"
        self._failure = Failure(self._episode.request.area, reason)

    async def _unless_stopped(self, call: Awaitable[T]) -> T | None:
        """Wait for a call; None if the response is stopped before it returns."""
        running = asyncio.ensure_future(call)
        stopping = asyncio.ensure_future(self._stopping.wait())
        self.is_waiting = True
        await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
        self.is_waiting = False
        if running.done():
            stopping.cancel()
            return running.result()
        # the host continues; only this wait ends
        running.cancel()
        return None


def _segments(sampled: Response) -> list[Segment]:
    """Return the tokens of a recorded turn, a segment for each policy version."""
    bounds = np.flatnonzero(np.diff(sampled.policy_versions)) + 1
    parts = zip(
        np.split(sampled.token_ids, bounds),
        np.split(sampled.logprobs, bounds),
        np.split(sampled.policy_versions, bounds),
        strict=True,
    )
    return [Segment(ids.tolist(), logprobs, int(versions[0])) for ids, logprobs, versions in parts]
