"""The examples of docs/environments.md, as a reader copies them."""

import json
import random
import re
import tomllib
from pathlib import Path

from megadapo.environments.config import EnvironmentConfig
from megadapo.environments.environment import Action, ToolCall
from megadapo.rollout.types import SampledTurn
from tests.support import REPOSITORY
from tests.support.rollout.hosts import content_of, task_of, turn_of, with_host

PAGE = (REPOSITORY / "docs" / "environments.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


def configs(data: Path) -> list[EnvironmentConfig]:
    """Return the entries of the page that need no other Python; `data` is their folder /data."""
    texts = [text.replace('"/data/', f'"{data}/') for text in blocks("toml")]
    tables = [tomllib.loads(text)["rollout"]["environments"] for text in texts]
    entries = [EnvironmentConfig(**entry) for (entry,) in tables]
    return [entry for entry in entries if entry.python is None]


def test_examples_play(tmp_path, monkeypatch):
    game, tools = blocks("python")
    (tmp_path / "my_games.py").write_text(game)
    (tmp_path / "my_tools.py").write_text(tools)
    row = {"id": "1", "title": "Berlin", "text": "The capital of Germany."}
    (tmp_path / "passages.jsonl").write_text(json.dumps(row))
    monkeypatch.chdir(tmp_path)
    hidden = random.Random(5).randint(0, 9)

    async def play(host):
        await host.open("game", 0, task_of("game"))
        wrong = await host.step("game", 0, turn_of("no idea"))
        assert content_of(wrong) == "Write a number."
        assert content_of(await host.step("game", 1, turn_of("11"))) == "lower"
        right = await host.step("game", 2, turn_of(f"I say {hidden}"))
        assert (right.observation.reward, right.observation.done) == (1.0, True)
        await host.open("tools", 1, task_of("tools"))
        calls = [ToolCall(name="divide", arguments={"a": 3.0, "b": b}) for b in (2.0, "two")]
        action = Action(text="", tool_calls=calls)
        outcome = await host.step("tools", 0, SampledTurn("1", None, action))
        divided, mistake = (message["content"] for message in outcome.observation.messages)
        assert divided == "1.5"
        assert f"\n{mistake}\n" in PAGE
        by_zero = Action(text="", tool_calls=[ToolCall(name="divide", arguments={"a": 1, "b": 0})])
        failed = await host.step("tools", 1, SampledTurn("2", None, by_zero))
        assert failed.failure.startswith("exception: ZeroDivisionError: ")

        await host.open("text", 2, task_of("text"))
        found = await host.step("text", 0, turn_of("So <python>6 * 7</python>"))
        assert found.observation.text == "<result>42</result>"
        await host.open("search", 3, task_of("search"))
        call = ToolCall(name="search", arguments={"query": "capital"})
        asked = SampledTurn("3", None, Action(text="", tool_calls=[call]))
        found = content_of(await host.step("search", 0, asked))
        assert found == "[1] Berlin\nThe capital of Germany."
        await host.open("both", 4, task_of("both"))
        for number, text in enumerate(["<search>Germany</search>", "<python>1</python>"]):
            found = await host.step("both", number, turn_of(text))
            assert found.observation.text.startswith("<result>")

    entries = configs(tmp_path)
    names = [entry.environment for entry in entries[2:]]
    assert names == ["python", "search", "tools", "openenv"]
    with_host(entries, play)
