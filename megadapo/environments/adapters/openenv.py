"""The environment "openenv": an episode on an OpenEnv server, over WebSocket.

The messages are those of openenv-core 0.3 and openenv 0.10. A session ends with its connection, so
a lost connection is a failure of the episode.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from megadapo.environments.environment import (
    Action,
    Environment,
    EnvironmentFailure,
    Observation,
    Task,
)

MAX_MESSAGE_BYTES = 16 << 20
INVALID = "VALIDATION_ERROR"
"""Code of the error that the model's action causes; all others are failures."""


class OpenEnv(Environment):
    """A client of one server, which needs `network = true`.

    Args:
        url: address of the server, such as "ws://127.0.0.1:8000"; http and https are allowed too.
        field: field of the server's action that takes the model's text. Without it the action is
            the arguments of a tool call, or a turn that is a JSON object.
        after: text after which the model's text starts, such as "</think>"; the last one counts.
        text: field of the server's observation that is shown as a message; none: all as JSON.
        tools: JSON schemas that the chat template shows, whose arguments are the action's fields.

    Raises:
        PermissionError: the process may not open sockets.
    """

    def __init__(
        self,
        *,
        url: str,
        field: str | None = None,
        after: str | None = None,
        text: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        scheme, mark, address = url.partition("://")
        secure = {"ws": "ws", "http": "ws", "wss": "wss", "https": "wss"}
        if not mark or scheme not in secure:
            raise ValueError(f'the option url = "{url}" must start with ws:// or wss://')
        # before the run, as a reset takes this for a server that is away
        try:
            socket.socket().close()
        except PermissionError as error:
            raise PermissionError(f"{error}; OpenEnv needs network = true") from error
        self._url = f"{secure[scheme]}://{address.removesuffix('/').removesuffix('/ws')}/ws"
        self._field, self._after, self._text = field, after, text
        self.tools = tuple(tools)
        self._connection: ClientConnection | None = None

    async def reset(self, task: Task) -> Observation | None:
        try:
            # a server that is busy with a step may answer no ping; the time limit of a step decides
            self._connection = await connect(
                self._url, max_size=MAX_MESSAGE_BYTES, ping_timeout=None, open_timeout=None
            )
        except (OSError, WebSocketException) as error:
            raise EnvironmentFailure(f"{self._url} cannot be reached: {error}") from error
        episode = {"episode_id": task.episode} if task.episode else {}
        reply = await self._ask("reset", {**task.extra_info, "seed": task.seed, **episode})
        if reply["type"] == "error":
            raise EnvironmentFailure(f"{self._url} refused a reset: {_describe(reply)}")
        return self._observation(reply["data"])

    async def step(self, action: Action) -> Observation:
        try:
            data = self._action(action)
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return _mistake("The action is not valid Unicode.")
        except ValueError as error:
            return _mistake(str(error))
        reply = await self._ask("step", data)
        if reply["type"] == "error":
            return _mistake(f"The action is not valid: {_describe(reply)}")
        return self._observation(reply["data"])

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            # if the connection is lost, so is the session
            with contextlib.suppress(ConnectionClosed):
                await connection.send(json.dumps({"type": "close"}))
            await connection.close()

    def _action(self, action: Action) -> Mapping[str, Any]:
        """Return the fields of the server's action.

        Raises:
            ValueError: the model wrote none.
        """
        if action.problem:
            raise ValueError(f"The call cannot be read: {action.problem}")
        text = action.text.rpartition(self._after)[2] if self._after else action.text
        if self._field is not None:
            return {self._field: text}
        if len(action.tool_calls) > 1:
            raise ValueError("Only one call is allowed in a turn.")
        if action.tool_calls:
            return dict(action.tool_calls[0].arguments)
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"The action is not JSON: {error}.") from error
        if not isinstance(data, dict):
            raise ValueError("The action is not a JSON object.")
        return data

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a message; return the reply: an observation, or an error of the model's action.

        Raises:
            EnvironmentFailure: the connection is lost, or the server failed.
        """
        if self._connection is None:
            raise EnvironmentFailure(f"there is no connection to {self._url}")
        try:
            # a server at its capacity sends the reason and closes, maybe before it gets a message
            with contextlib.suppress(ConnectionClosed):
                await self._connection.send(json.dumps({"type": kind, "data": data}))
            reply = json.loads(await self._connection.recv())
        except (WebSocketException, OSError) as error:
            raise EnvironmentFailure(f"the connection to {self._url} is lost: {error}") from error
        except ValueError as error:
            raise EnvironmentFailure(f"{self._url} sent no JSON: {error}") from error
        is_dict = isinstance(reply, dict) and isinstance(reply.get("data"), dict)
        if is_dict and reply.get("type") == "error" and reply["data"].get("code") == INVALID:
            return dict(reply)
        if is_dict and reply.get("type") == "error":
            raise EnvironmentFailure(f"{self._url} failed: {_describe(reply)}")
        if not is_dict or reply.get("type") != "observation":
            raise EnvironmentFailure(f"{self._url} sent no observation: {str(reply)[:200]}")
        return dict(reply)

    def _observation(self, data: Mapping[str, Any]) -> Observation:
        # openenv 0.10 repeats the server's metadata here, which is not for the model
        observed = {k: v for k, v in data.get("observation", {}).items() if k != "metadata"}
        if self._text is None:
            content = json.dumps(observed, ensure_ascii=False)
        elif self._text in observed:
            content = str(observed[self._text])
        else:
            raise EnvironmentFailure(
                f'{self._url} observes no field "{self._text}": set the option text to one of '
                f"{', '.join(observed)}"
            )
        return Observation(
            messages=({"role": "user", "content": content},),
            reward=float(data.get("reward") or 0.0),
            done=bool(data.get("done")),
        )


def _mistake(text: str) -> Observation:
    message = {"role": "user", "content": text}
    return Observation(messages=(message,), metrics={"invalid_actions": 1.0})


def _describe(reply: Mapping[str, Any]) -> str:
    """Return the message of an error, and where the action is wrong."""
    data = reply["data"]
    errors = [
        f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg', '')}"
        for error in data.get("errors") or ()
    ]
    return "; ".join(errors) or f"{data.get('code')}, {data.get('message')}"
