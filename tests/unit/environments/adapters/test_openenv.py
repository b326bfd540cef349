"""A client of an OpenEnv server tells the model's mistakes from failures.

The server here speaks as `openenv init echo_local` of openenv 0.10.0 and openenv-core 0.3.0 does:
its replies were recorded from them.
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from megadapo.environments.adapters.openenv import OpenEnv
from megadapo.environments.environment import EnvironmentFailure, Observation, ToolCall
from tests.unit.environments.adapters.playing import Player, task


class EchoServer:
    """A server that echoes messages; some of them make it fail."""

    def __init__(self, *, version: str, capacity: int) -> None:
        self.received: list[Any] = []
        self._with_metadata, self._capacity, self._num_open = version == "0.10", capacity, 0

    async def handle(self, connection: ServerConnection) -> None:
        if self._num_open == self._capacity:
            text = f"Server at capacity: {self._capacity}/{self._capacity} sessions active."
            await connection.send(_error("CAPACITY_REACHED", text, active_sessions=1))
            return
        self._num_open += 1
        try:
            async for line in connection:
                message = json.loads(line)
                self.received.append(message)
                if message["type"] == "close":
                    return
                await connection.send(self._reply(connection, **message))
        finally:
            self._num_open -= 1

    def _reply(self, connection: ServerConnection, type: str, data: Any) -> str:
        if type == "reset":
            refused = data.get("refuse")
            return _error(refused, "no") if refused else self._observed("ready!", 0.0)
        if not isinstance(data.get("message"), str):
            missing = {"type": "missing", "loc": ["message"], "msg": "Field required"}
            extra = {"loc": ["massage"], "msg": "Extra inputs are not permitted", "input": 3}
            return _error("VALIDATION_ERROR", "Invalid message", errors=[missing, extra])
        match data["message"]:
            case "raise":
                return _error("EXECUTION_ERROR", "division by zero")
            case "drop":
                connection.transport.abort()
            case "garbage" | "[]" | '{"type": "state", "data": {}}' as text:
                return text
        return self._observed(data["message"], 0.2, done=data["message"] == "end")

    def _observed(self, text: str, reward: float, *, done: bool = False) -> str:
        observation = {"echoed_message": text, "message_length": len(text)}
        if self._with_metadata:
            observation = {"metadata": {"answer": text}, **observation}
        data = {"observation": observation, "reward": reward, "done": done}
        return json.dumps({"type": "observation", "data": data})


def _error(code: str, text: str, **more: Any) -> str:
    return json.dumps({"type": "error", "data": {"message": text, "code": code, **more}})


@contextmanager
def serving(
    *, version: str = "0.10", capacity: int = 8, **options: Any
) -> Iterator[tuple[Player, EchoServer]]:
    """Play an episode on a server of its own, in one event loop."""
    loop, echo = asyncio.new_event_loop(), EchoServer(version=version, capacity=capacity)

    async def start() -> Any:
        return await serve(echo.handle, "127.0.0.1", 0)

    server = loop.run_until_complete(start())
    port = server.sockets[0].getsockname()[1]
    player = Player(OpenEnv(url=f"http://127.0.0.1:{port}/", **options), loop)
    try:
        yield player, echo
    finally:
        player.value(player.environment.close())
        server.close()
        loop.run_until_complete(server.wait_closed())
        loop.close()


def said(found: Observation) -> str:
    (message,) = found.messages
    assert message["role"] == "user"
    return message["content"]


@pytest.mark.parametrize("version", ["0.10", "0.3"])
def test_an_episode_is_a_session_of_the_server(version: str) -> None:
    with serving(version=version, field="message", text="echoed_message") as (player, echo):
        assert said(player.reset(task(seed=7, episode="1-5", split="train"))) == "ready!"
        found = player.turn("héllo 中文 😀 </s>")
        assert said(found) == "héllo 中文 😀 </s>"
        assert (found.reward, found.done, found.text) == (0.2, False, None)
        assert player.turn("").reward == 0.2 and player.turn("end").done
        player.value(player.environment.close())
        player.value(player.environment.close())
    kinds = [message["type"] for message in echo.received]
    assert kinds == ["reset", "step", "step", "step", "close"]
    assert echo.received[0]["data"] == {"split": "train", "seed": 7, "episode_id": "1-5"}
    assert echo.received[1]["data"] == {"message": "héllo 中文 😀 </s>"}


@pytest.mark.parametrize("version", ["0.10", "0.3"])
def test_actions_and_observations_are_json_without_fields(version: str) -> None:
    """Metadata may hold the answer, and one version of the server repeats them."""
    with serving(version=version) as (player, echo):
        assert said(player.reset(task())) == '{"echoed_message": "ready!", "message_length": 6}'
        assert json.loads(said(player.turn('{"message": "é"}')))["echoed_message"] == "é"
        found = player.turn("ignored", [ToolCall(name="echo", arguments={"message": "call"})])
        assert json.loads(said(found)) == {"echoed_message": "call", "message_length": 4}
    assert [message["data"] for message in echo.received[1:3]] == [
        {"message": "é"},
        {"message": "call"},
    ]


@pytest.mark.parametrize(
    ("text", "calls", "mistake"),
    [
        ("", 0, "not JSON"),
        ('{"message": ', 0, "not JSON"),
        ("[" * 100_000, 0, "not JSON"),
        ("<think>x", 0, "not JSON"),
        ("[]", 0, "not a JSON object"),
        ("null", 0, "not a JSON object"),
        ('{"massage": 3}', 0, "message: Field required; massage: Extra inputs are not permitted"),
        ("", 2, "Only one call"),
        ('{"message": "\\ud800"}', 0, "not valid Unicode"),
    ],
)
def test_mistakes_of_the_model_are_observed(text: str, calls: int, mistake: str) -> None:
    with serving() as (player, _):
        player.reset(task())
        found = player.turn(text, [ToolCall(name="echo", arguments={"message": "x"})] * calls)
        assert mistake in said(found) and found.metrics == {"invalid_actions": 1.0}
        assert (found.reward, found.done) == (0.0, False)
        assert player.turn('{"message": "x"}').reward == 0.2


def test_a_call_that_cannot_be_read_is_observed() -> None:
    with serving(field="message") as (player, echo):
        player.reset(task())
        assert "cannot be read: no JSON" in said(player.turn("x", problem="no JSON"))
    assert [message["type"] for message in echo.received] == ["reset", "close"]


def test_action_starts_behind_the_thinking() -> None:
    with serving(field="message", after="</think>", text="echoed_message") as (player, _):
        player.reset(task())
        assert said(player.turn("<think>a</think>b</think>c")) == "c"
        assert said(player.turn("<think>a")) == "<think>a"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise", "EXECUTION_ERROR, division by zero"),
        ("drop", "is lost"),
        ("garbage", "sent no JSON"),
        ("[]", "sent no observation"),
        ('{"type": "state", "data": {}}', "sent no observation"),
    ],
)
def test_failures_of_the_server_are_no_observations(text: str, reason: str) -> None:
    with serving(field="message") as (player, _):
        player.reset(task())
        with pytest.raises(EnvironmentFailure, match=reason):
            player.turn(text)
        if text == "drop":
            with pytest.raises(EnvironmentFailure, match="is lost"):
                player.turn("again")


@pytest.mark.parametrize("code", ["VALIDATION_ERROR", "EXECUTION_ERROR", "FACTORY_ERROR"])
def test_a_refused_reset_is_never_the_models_fault(code: str) -> None:
    with serving() as (player, _), pytest.raises(EnvironmentFailure, match=code):
        player.reset(task(refuse=code))


def test_a_full_server_is_a_failure_with_its_reason() -> None:
    """It says so and closes, so that the reset may find a closed connection."""
    with serving(capacity=0) as (player, _):
        for _ in range(20):
            with pytest.raises(EnvironmentFailure, match="CAPACITY_REACHED, Server at capacity"):
                player.reset(task())


def test_no_server_is_a_failure() -> None:
    loop = asyncio.new_event_loop()
    player = Player(OpenEnv(url="ws://127.0.0.1:9"), loop)
    with pytest.raises(EnvironmentFailure, match="cannot be reached"):
        player.reset(task())
    with pytest.raises(EnvironmentFailure, match="no connection"):
        player.turn("{}")
    player.value(player.environment.close())
    loop.close()


def test_unknown_field_of_the_observation_is_named() -> None:
    wrong = pytest.raises(EnvironmentFailure, match='no field "board".*echoed_message')
    with serving(text="board") as (player, _), wrong:
        player.reset(task())


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", ""])
def test_wrong_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="must start with ws"):
        OpenEnv(url=url)
