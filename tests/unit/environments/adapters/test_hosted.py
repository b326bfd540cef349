"""Built-in environments play in the processes of a host, which can be killed."""

import json
import os
import signal
import socket
import subprocess
from importlib import import_module
from typing import Any

import pytest
from websockets.asyncio.server import serve

from megadapo.environments.adapters import BUILT_IN
from megadapo.environments.config import EnvironmentConfig
from megadapo.environments.environment import Action, ToolCall
from megadapo.errors import ConfigError
from megadapo.rollout.types import SampledTurn
from tests.support.rollout.hosts import content_of, task_of, with_host
from tests.unit.environments.adapters.test_openenv import EchoServer

NO_MEGADAPO = "/usr/bin/python3"


def hosted(environment: str, options: dict[str, Any], **fields: Any) -> EnvironmentConfig:
    return EnvironmentConfig(environment=environment, options=options, **fields)


def turn(text: str, name: str = "", **arguments: Any) -> SampledTurn:
    calls = (ToolCall(name=name, arguments=arguments),) if name else ()
    key = json.dumps([text, name, arguments])
    return SampledTurn(key, None, Action(text=text, tool_calls=calls))


async def play(host: Any, episode: str, turns: list[SampledTurn], start: int = 0) -> list[Any]:
    """Return what each turn observed: the content of its message, or its text."""
    found = [await host.step(episode, number, one) for number, one in enumerate(turns, start)]
    assert [one.failure for one in found] == [None] * len(turns)
    return [content_of(one) if one.observation.messages else one.observation.text for one in found]


def test_variables_are_back_after_a_killed_process() -> None:
    """The random number and the address would differ, and fail the replay."""
    code = "import random\nx = [random.random(), object()]\nx"
    turns = [turn("", "python", code=code), turn("", "python", code="x[0] = 5; 1/0")]

    async def run(host: Any) -> list[str]:
        await host.open("a", 0, task_of("a"))
        first = await play(host, "a", turns)
        for pid in host.process_ids:
            os.kill(pid, signal.SIGKILL)
        opened = await host.open("a", 0, task_of("a"), [one.digest for one in turns])
        assert opened.failure is None
        return first + await play(host, "a", [turn("", "python", code="x[0] + 1")], start=2)

    first, second, third = with_host([hosted("python", {}, memory_mib=2048)], run)
    assert "object at 0x...>" in first and "ZeroDivisionError" in second and third == "6"


def test_openenv_plays_with_the_network_and_is_refused_without() -> None:
    """Every reset would be tried for a minute, as if the server was away."""

    async def run(host: Any) -> Any:
        echo = EchoServer(version="0.10", capacity=4)
        async with await serve(echo.handle, "127.0.0.1", port):
            await host.open("a", 0, task_of("a"))
            return await play(host, "a", [turn("hi")])

    port = _free_port()
    options = {"url": f"ws://127.0.0.1:{port}", "field": "message", "text": "echoed_message"}
    assert with_host([hosted("openenv", options, network=True)], run) == ["hi"]
    with pytest.raises(ConfigError, match="network = true"):
        with_host([hosted("openenv", options)], run)


@pytest.mark.parametrize(
    ("environment", "options", "call", "found"),
    [
        ("python", {}, turn("", "python", code="1 + 1"), "2"),
        ("calculator", {"start": "", "stop": "="}, turn("1+1="), "<result>2</result>"),
        ("tools", {"mark": {"stop": ";"}, "python": {}}, turn("1;"), ""),
    ],
)
def test_another_python_needs_no_megadapo(
    environment: str, options: dict[str, Any], call: SampledTurn, found: str
) -> None:
    check = "import sys; assert sys.version_info >= (3, 11)"
    try:
        if subprocess.run([NO_MEGADAPO, "-c", check], capture_output=True).returncode:
            pytest.skip("no other Python")
    except OSError:
        pytest.skip("no other Python")

    async def run(host: Any) -> list[str]:
        await host.open("a", 0, task_of("a"))
        return await play(host, "a", [call])

    assert with_host([hosted(environment, options, python=NO_MEGADAPO)], run) == [found]


def test_wrong_options_are_reported_before_the_run() -> None:
    async def run(host: Any) -> None:
        raise AssertionError("it must not start")

    configs = [
        hosted("calculator", {"stop": ""}),
        hosted("python", {"start": "<python>"}),
        hosted("search", {"corpus": "/nowhere.jsonl"}),
        hosted("openenv", {"url": "localhost:8000"}),
        hosted("tools", {"mark": {}}),
    ]
    with pytest.raises(ConfigError) as caught:
        with_host(configs, run)
    lines = str(caught.value).splitlines()
    wrong = ["stop is empty", "start and stop", "nowhere", "must start with ws", "'stop'"]
    assert len(lines) == len(wrong)
    for line, part in zip(lines, wrong, strict=True):
        assert part in line


def test_every_built_in_name_has_its_class() -> None:
    for path in BUILT_IN.values():
        module, _, name = path.partition(":")
        assert isinstance(getattr(import_module(module), name), type)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]
