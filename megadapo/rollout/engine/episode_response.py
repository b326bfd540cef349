"""A response whose turns an environment answers.

Imports vLLM: only engine.py does so, inside the actor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar, cast

import numpy as np

from megadapo.data.group import NO_VERSION, Failure, Response, Turn
from megadapo.errors import ConfigError, DataError
from megadapo.rollout.engine.episode import RemoteEpisode, sampled_of
from megadapo.rollout.engine.in_flight import InFlightResponse, Segment
from megadapo.rollout.episodes.types import Outcome
from megadapo.rollout.types import EpisodeRequest

T = TypeVar("T")


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
        observation, ids = outcome.observation, []
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
                num_left = self._num_left(self._token_ids)
                ids = self._episode.observation_ids(observation, turn_ids)[:num_left]
            except (ConfigError, DataError) as error:
                self._fail(f"wrong result: {error}")
                return
        self._segments.append(Segment(ids, None, NO_VERSION))
        end = len(self._token_ids)
        self._turns.append(
            Turn(
                end=end,
                reward=observation.reward,
                seconds=outcome.seconds,
                is_call=is_call,
                metrics=tuple(observation.metrics.items()),
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
