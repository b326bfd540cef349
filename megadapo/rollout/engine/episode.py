"""Responses whose turns an environment answers, as an engine sees them: one request per turn.

The host of the environments is an actor beside the driver. Imports vLLM, whose parsers read calls
of tools; only engine.py does so, inside the actor.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionToolsParam,
)
from vllm.tool_parsers import ToolParserManager

from megadapo.data.group import CUT_MESSAGES, NO_VERSION, Failure, Response, Turn
from megadapo.environments.environment import Action, Observation, ToolCall
from megadapo.errors import ConfigError, DataError
from megadapo.rollout.engine.in_flight import InFlightResponse, Segment
from megadapo.rollout.types import EpisodeRequest, Opened, Outcome, SampledTurn
from megadapo.tokens.chat import output_ids
from megadapo.tokens.turns import Turns

if TYPE_CHECKING:
    from ray.actor import ActorHandle

T = TypeVar("T")

MAX_DEPTH = 64
"""Levels of a call's arguments; with hundreds, copies of them exceed Python's stack."""


class EpisodeTexts:
    """The tokenizer's part of episodes: turns become actions, observations tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._parsers: dict[int, Any] = {}

    @cached_property
    def _turns(self) -> Turns:
        try:
            return Turns(self._tokenizer)
        except ConfigError:
            # a template without tools may still have turns of the user
            return Turns(self._tokenizer, ("user",))

    def action(self, token_ids: Sequence[int], request: EpisodeRequest) -> Action:
        """Return a turn of the model as its environment sees it.

        Args:
            token_ids: sampled tokens, without a token that ends the turn.
        """
        text = cast(
            str,
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            ),
        )
        if request.config.tool_parser is None:
            return Action(text=text)
        parser = self._parser(request)
        chat_request = ChatCompletionRequest(
            messages=[], seed=0, tools=_readable(request.description.tools) or None
        )
        try:
            found = parser.extract_tool_calls(text, chat_request)
        except Exception as error:
            # a parser may raise anything for a text of its model, whose mistake that is
            return Action(text=text, problem=f"the calls cannot be read: {error!r:.200}")
        start = next(
            (
                getattr(parser, name)
                for name in ("tool_calls_start_token", "tool_call_start_token")
                if getattr(parser, name, None)
            ),
            None,
        )
        calls: list[ToolCall] = []
        problem = ""
        for call in found.tool_calls:
            try:
                calls.append(_tool_call(call.function.name, call.function.arguments or "{}"))
            except (RecursionError, ValueError):
                problem = "the arguments of a call are no JSON object"
        if not found.tool_calls and start is not None and start in text:
            problem = f"the text after {start} cannot be read as a call"
        return Action(text=text, tool_calls=tuple(calls), problem=problem)

    def observation_ids(
        self, observation: Observation, turn_ids: Sequence[int], request: EpisodeRequest
    ) -> tuple[list[int], int]:
        """Return the tokens to append after a turn, and how many messages or texts are cut.

        Names of control tokens are plain text.

        Raises:
            DataError: the chat template has no place for the messages.
            ConfigError: there is no chat template to write messages with.
        """
        if observation.token_ids is not None:
            self._check_ids(observation.token_ids, request.config.max_observation_tokens)
            return list(observation.token_ids), 0
        if observation.text is not None:
            text = observation.text
            # the frame of a longer result stays whole
            before, _, after = request.description.output.partition("{}")
            if not (text.startswith(before) and text.endswith(after)):
                before = after = ""
            result, is_cut = self._shown(text.removeprefix(before).removesuffix(after), request)
            text = before + result + after if is_cut else text
            return output_ids(text, request.description.output, self._tokenizer), int(is_cut)
        if not observation.messages:
            raise DataError("an observation that does not end the episode has no messages")
        messages, num_cut = [], 0
        for message in observation.messages:
            text, is_cut = self._shown(message["content"], request)
            messages.append({**message, "content": text})
            num_cut += is_cut
        return self._turns.ids_after(turn_ids, messages), num_cut

    def _shown(self, text: str, request: EpisodeRequest) -> tuple[str, bool]:
        """Return the part of a message or text that the model reads, and whether it was cut."""
        # names of control tokens become plain text, which has more tokens
        ids = output_ids(text, "{}", self._tokenizer)
        num = request.config.max_observation_tokens
        if len(ids) <= num:
            return text, False
        kept = self._tokenizer.decode(
            ids[:num] if request.config.truncation_side == "right" else ids[-num:],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        # bytes of a character that the cut divides
        return cast(str, kept).strip("\ufffd"), True

    def _check_ids(self, token_ids: Sequence[int], max_tokens: int) -> None:
        if len(token_ids) > max_tokens:
            raise DataError(
                f"an observation has {len(token_ids)} token ids, which cannot be cut off: raise "
                f"rollout.environments.max_observation_tokens = {max_tokens}"
            )
        if max(token_ids, default=0) >= len(self._tokenizer):
            raise DataError(
                f"an observation has the token id {max(token_ids)}, and the model's tokenizer has "
                f"{len(self._tokenizer)} tokens: the environment must use the same tokenizer"
            )

    def _parser(self, request: EpisodeRequest) -> Any:
        # another one for each environment, as parsers need its tools for the types of arguments
        if request.environment not in self._parsers:
            assert request.config.tool_parser is not None, "checked by the caller"
            parser: Any = ToolParserManager.get_tool_parser(request.config.tool_parser)
            tools = _readable(request.description.tools)
            self._parsers[request.environment] = parser(self._tokenizer, tools)
        return self._parsers[request.environment]


def _readable(tools: Sequence[Mapping[str, Any]]) -> list[ChatCompletionToolsParam]:
    """Return the tools as vLLM's parsers take them, without those in the format of a template."""
    found = []
    for tool in tools:
        with suppress(ValidationError):
            found.append(ChatCompletionToolsParam.model_validate(tool))
    return found


def _tool_call(name: str, arguments: str) -> ToolCall:
    """Return a call whose name and arguments every environment can encode.

    Raises:
        RecursionError, ValueError: the arguments are no JSON object, too deep, or no Unicode.
    """

    def check(value: Any, left: int) -> None:
        if not left:
            raise ValueError(f"more than {MAX_DEPTH} levels")
        inner = value.values() if isinstance(value, dict) else value
        for one in inner if isinstance(value, dict | list) else ():
            check(one, left - 1)

    read = json.loads(arguments)
    if not isinstance(read, dict):
        raise ValueError("no object")
    check(read, MAX_DEPTH)
    # half of a surrogate pair is JSON, but no text
    json.dumps([name, read], ensure_ascii=False).encode()
    return ToolCall(name=name, arguments=read)


class EpisodeResponse(InFlightResponse):
    """A response in flight that is an episode of an environment.

    While its environment works, it has no request, and so no slot of the engine.
    """

    def __init__(
        self, *arguments: Any, host: ActorHandle[Any], texts: EpisodeTexts, **options: Any
    ) -> None:
        """Add the host of the environments to the arguments of `InFlightResponse`."""
        super().__init__(*arguments, **options)
        self._host, self._texts = host, texts
        self._name: str | None = None
        """Name of the open episode; None: it is not open."""

    async def submit(self) -> None:
        """Submit the rest of the response, if its episode is open."""
        if self._name is not None:
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
        if self._name is not None:
            self._host.close.remote([self._name])
            self._name = None

    async def _after_output(self) -> None:
        # the end of a turn is not the end of the response
        if self._finish_reason != "stop" or not self._may_act:
            return
        self._finish_reason = "unfinished"
        by_rest = (
            isinstance(self._stop_reason, str)
            and self._stop_reason not in self._request.description.stop
        )
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
        return self._num_calls < self._request.config.max_turns

    @property
    def _stop_texts(self) -> Sequence[str]:
        """Texts that end a turn, and the rest of one that the response was stopped in.

        A rest may occur elsewhere too; the response then continues.
        """
        stop = self._request.description.stop
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
        num_left, limit = self._num_left(token_ids), self._request.config.max_turn_tokens
        if limit is None:
            return num_left
        start = max((turn.end for turn in self._turns if turn.is_call), default=0)
        return min(num_left, start + limit - len(token_ids))

    async def _open(self) -> None:
        """Begin the episode, or bring it to the last turn that was answered before.

        It is known by the seed and the policy version that began it, so an engine that gets a
        stopped response, or one of an engine that died, continues the same episode.
        """
        request, group, before = self._request, self._group.request, self.response()
        versions = before.policy_versions[before.is_sampled]
        version = int(versions[0]) if len(versions) else self._group.policy_version
        parent = None
        if self._branch is not None:
            parent = f"{version}-{group.seeds[self._branch.parent]}"
        task = request.task
        if request.description.uses_tokens:
            task = replace(task, prompt_ids=group.prompt_ids)
        turns = [(before.token_ids[turn], before.logprobs[turn]) for turn in before.actions]
        digests = [_digest(token_ids) for token_ids, _ in turns]
        actions = [self._action(*turn) for turn in turns]
        self._name = f"{version}-{self._seed}"
        opening: Any = self._host.open.remote(
            self._name, request.environment, task, digests, parent, actions
        )
        opened: Opened | None = await self._unless_stopped(opening)
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
            assert turn.outcome is not None, "recorded turns have been answered"
            assert turn.sampled is not None, "turns after those of the response have tokens"
            length = len(self._token_ids) + len(turn.sampled.token_ids)
            if self._stop_at is not None and length > self._stop_at:
                break
            self._segments += _segments(turn.sampled)
            self._observe(turn.outcome, turn.sampled.token_ids.tolist())
        if len(current) and self._may_act and self._ends_turn(current.tolist()):
            await self._ask()

    def _ends_turn(self, token_ids: Sequence[int]) -> bool:
        """Return whether the tokens of a turn are complete."""
        if token_ids[-1] in self._ends:
            return True
        text = cast(str, self._group.tokenizer.decode(list(token_ids)))
        return any(one in text for one in self._request.description.stop)

    async def _ask(self) -> None:
        """Have the environment answer the turn that has just ended.

        If the response is stopped meanwhile, the host finishes the turn for a later request.
        """
        response = self.response()
        start = self._turns[-1].end if self._turns else 0
        sampled = Response(
            token_ids=response.token_ids[start:],
            logprobs=response.logprobs[start:],
            finish_reason="unfinished",
            text="",
            policy_versions=response.policy_versions[start:],
        )
        turn = SampledTurn(
            digest=_digest(sampled.token_ids),
            sampled=sampled,
            action=self._action(sampled.token_ids, sampled.logprobs),
        )
        stepping: Any = self._host.step.remote(self._name, len(response.actions), turn)
        outcome: Outcome | None = await self._unless_stopped(stepping)
        if outcome is not None:
            self._observe(outcome, sampled.token_ids.tolist())

    def _action(self, token_ids: np.ndarray, logprobs: np.ndarray) -> Action:
        """Return a turn of the model as its environment sees it."""
        ids: list[int] = token_ids.tolist()
        # the token that ends the turn is not part of it
        action = self._texts.action(ids[: len(ids) - (ids[-1] in self._ends)], self._request)
        if not self._request.description.uses_tokens:
            return action
        return replace(action, token_ids=tuple(ids), logprobs=tuple(logprobs.tolist()))

    def _observe(self, outcome: Outcome, turn_ids: Sequence[int]) -> None:
        """Append the answer to a turn; end the response if the episode is over."""
        observation, num_cut = outcome.observation, 0
        ids: list[int] = []
        if observation is None:
            self._fail(outcome.failure or "")
            return
        is_call = observation.is_call and not observation.done and bool(turn_ids)
        num_calls = self._num_calls + is_call
        is_last = num_calls >= self._request.config.max_turns and observation.text is None
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
                ids, num_cut = self._texts.observation_ids(observation, turn_ids, self._request)
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
        self._finish_reason = "failed"
        self._failure = Failure(self._request.area, reason)

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


def _digest(token_ids: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(token_ids, dtype="<i4").tobytes()).hexdigest()
