"""The environment of a response, as an engine sees it: turns become actions, observations tokens.

The host of the environments is an actor beside the driver. Imports vLLM, whose parsers read calls
of tools; only engine.py does so, inside the actor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionToolsParam,
)
from vllm.tool_parsers import ToolParserManager

from megadapo.data.group import Response, decode_response, encode_response
from megadapo.environments.environment import Action, Observation, ToolCall
from megadapo.errors import ConfigError, DataError
from megadapo.rollout.types import EpisodeRequest, Opened, Outcome, SampledTurn
from megadapo.tokens.chat import output_ids
from megadapo.tokens.turns import Turns

if TYPE_CHECKING:
    from ray.actor import ActorHandle


MAX_DEPTH = 64
"""Levels of a call's arguments; with hundreds, copies of them exceed Python's stack."""


class EpisodeClient:
    """The host of the environments, and what its answers need of the tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, actor: ActorHandle[Any]) -> None:
        self.actor = actor
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
        if request.tool_parser is None:
            return Action(text=text)
        parser = self._parser(request)
        chat_request = ChatCompletionRequest(
            messages=[], seed=0, tools=_readable(request.tools) or None
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
            self._check_ids(observation.token_ids, request.max_observation_tokens)
            return list(observation.token_ids), 0
        if observation.text is not None:
            text = observation.text
            # the frame of a longer result stays whole
            before, _, after = request.output.partition("{}")
            if not (text.startswith(before) and text.endswith(after)):
                before = after = ""
            result, is_cut = self._shown(text.removeprefix(before).removesuffix(after), request)
            text = before + result + after if is_cut else text
            return output_ids(text, request.output, self._tokenizer), int(is_cut)
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
        num = request.max_observation_tokens
        if len(ids) <= num:
            return text, False
        kept = self._tokenizer.decode(
            ids[:num] if request.truncation_side == "right" else ids[-num:],
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
            assert request.tool_parser is not None, "checked by the caller"
            parser: Any = ToolParserManager.get_tool_parser(request.tool_parser)
            tools = _readable(request.tools)
            self._parsers[request.environment] = parser(self._tokenizer, tools)
        return self._parsers[request.environment]


def _readable(tools: Sequence[Mapping[str, Any]]) -> list[ChatCompletionToolsParam]:
    """Return the tools as vLLM's parsers take them, without those in the format of a template."""
    found = []
    for tool in tools:
        with suppress(ValidationError):
            found.append(ChatCompletionToolsParam.model_validate(tool))
    return found


class RemoteEpisode:
    """The episode of one response.

    It is known by its seed and the policy version that began it, so an engine that gets a stopped
    response, or one of an engine that died, continues the same episode.
    """

    def __init__(
        self,
        client: EpisodeClient,
        request: EpisodeRequest,
        prompt_ids: Sequence[int],
        seed: int,
        version: int,
        parent_seed: int | None = None,
    ) -> None:
        """`parent_seed`: of the response that it branches off."""
        self.request = request
        self._task = request.task
        if request.uses_tokens:
            self._task = replace(request.task, prompt_ids=tuple(prompt_ids))
        self._client = client
        self._name = f"{version}-{seed}"
        self._parent = None if parent_seed is None else f"{version}-{parent_seed}"

    async def open(self, response: Response, stop_ids: Collection[int]) -> Opened:
        """Begin the episode, or bring it to where the response is.

        `stop_ids`: tokens that end a turn, which are not part of its action.
        """
        actions = []
        for action in response.actions:
            ids, logprobs = response.token_ids[action].tolist(), response.logprobs[action]
            actions.append(self._action(ids, len(ids) - (ids[-1] in stop_ids), logprobs))
        digests = [_digest(response.token_ids[action]) for action in response.actions]
        opened: Opened = await self._client.actor.open.remote(
            *(self._name, self.request.environment, self._task),
            *(digests, self._parent, actions),
        )
        return opened

    async def step(self, turn: int, sampled: Response, end: int) -> Outcome:
        """Give the environment a turn of the model, and return its answer.

        Args:
            turn: number of the turn, from 0.
            sampled: the turn's tokens.
            end: number of these tokens before the one that ends the turn.
        """
        taken = SampledTurn(
            digest=_digest(sampled.token_ids),
            sampled=json.dumps(encode_response(sampled)).encode(),
            action=self._action(sampled.token_ids.tolist(), end, sampled.logprobs),
        )
        outcome: Outcome = await self._client.actor.step.remote(self._name, turn, taken)
        return outcome

    def _action(self, ids: list[int], end: int, logprobs: np.ndarray) -> Action:
        action = self._client.action(ids[:end], self.request)
        if not self.request.uses_tokens:
            return action
        return replace(action, token_ids=tuple(ids), logprobs=tuple(logprobs.tolist()))

    def close(self) -> None:
        """Tell the host that the episode has ended or is not wanted; does not wait."""
        self._client.actor.close.remote([self._name])

    def observation_ids(
        self, observation: Observation, turn_ids: Sequence[int]
    ) -> tuple[list[int], int]:
        """Return what `EpisodeClient.observation_ids` does."""
        return self._client.observation_ids(observation, turn_ids, self.request)


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


def sampled_of(recorded: bytes) -> Response:
    """Return the tokens of a turn that the host has recorded."""
    return decode_response(json.loads(recorded))


def _digest(token_ids: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(token_ids, dtype="<i4").tobytes()).hexdigest()
