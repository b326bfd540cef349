"""Episodes of the package verifiers, in processes of another Python.

`make test-verifiers` installs it. The small tokenizer is built like Qwen3's.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megadapo.data.prompts import load_prompts
from megadapo.environments.config import EnvironmentConfig
from megadapo.environments.environment import Action, Task
from megadapo.errors import ConfigError
from megadapo.observe.rollouts.files import read_rollouts, rollouts_path
from megadapo.rollout.types import SampledTurn
from megadapo.tokens.chat import chat_ids
from tests.support import REPOSITORY
from tests.support.rollout.hosts import with_host
from tests.support.tokenizers.small import write_tokenizer

PYTHON = Path(os.environ.get("MEGADAPO_VERIFIERS", REPOSITORY / "build/verifiers-0.4.0/bin/python"))
EXAMPLE = REPOSITORY / "examples" / "verifiers"
PROMPT = "Find my number from 12 to 26."
RETAINING = {"name": "qwen3", "thinking_retention": "all"}
LOGPROB = -0.5
TOOL = {
    "type": "function",
    "function": {
        "name": "compare",
        "description": "Compare a guess with the number.",
        "parameters": {"type": "object", "properties": {"guess": {"type": "integer"}}},
    },
}

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not PYTHON.exists(), reason="no verifiers: run make test-verifiers"),
]


@pytest.fixture(autouse=True)
def taskset_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the other Python find the tasksets, as if they were in the working folder."""
    folders = [EXAMPLE, REPOSITORY / "tests/support/environments/tasksets"]
    path = os.pathsep.join([*map(str, folders), os.environ["PYTHONPATH"]])
    monkeypatch.setenv("PYTHONPATH", path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_tokenizer("qwen3", tmp_path_factory.mktemp("tokenizer") / "qwen3")
    file = folder / "tokenizer_config.json"
    # as the model's own; verifiers' renderer of Qwen3 takes <|endoftext|> for unknown otherwise
    file.write_text(json.dumps(json.loads(file.read_text()) | {"unk_token": None}))
    return AutoTokenizer.from_pretrained(folder)


def config_of(tokenizer: Any, *, agent: Any = None, **fields: Any) -> EnvironmentConfig:
    options = {
        "model": tokenizer.name_or_path,
        "env": {
            "taskset": {"id": "tricky-taskset"},
            "agent": {"runtime": {"type": "subprocess"}, **(agent or {})},
        },
        **fields.pop("options", {}),
    }
    given = {"recovery": "once", "network": True, "timeout_s": 250.0, **fields}
    return EnvironmentConfig(environment="verifiers", options=options, python=str(PYTHON), **given)


class Game:
    """An episode of the host, and its tokens as an engine has them."""

    def __init__(self, host: Any, tokenizer: Any, name: str = "a", **data: Any) -> None:
        self._host, self._tokenizer, self.name = host, tokenizer, name
        self.ids = chat_ids([("user", PROMPT)], tokenizer, tools=data.get("tools", ()))
        task = {"prompt": PROMPT, "number": 20, **data}
        self.task = Task(
            id=name, messages=[], extra_info={"task": task}, prompt_ids=tuple(self.ids)
        )
        self.mask = [False] * len(self.ids)
        self.turns: list[SampledTurn] = []

    async def open(self, environment: int = 0) -> str | None:
        """Begin the episode, or continue it; return the reason why it cannot."""
        digests = [turn.digest for turn in self.turns]
        return (await self._host.open(self.name, environment, self.task, digests)).failure

    async def say(self, text: str, *, oddly: bool = False) -> Any:
        """Act; return the outcome. `oddly`: with a token for each character."""
        pieces = [*text] if oddly else [text]
        assert not oddly or len(pieces) > len(self._encode(text))
        ids = [one for part in pieces for one in self._encode(part)] + self._encode("<|im_end|>")
        action = Action(text=text, token_ids=ids, logprobs=[LOGPROB] * len(ids))
        self.turns.append(SampledTurn(text, None, action))
        outcome = await self._host.step(self.name, len(self.turns) - 1, self.turns[-1])
        given = outcome.observation.token_ids or [] if outcome.observation else []
        self.ids += [*ids, *given]
        self.mask += [*[True] * len(ids), *[False] * len(given)]
        return outcome

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def shown(self, outcome: Any) -> str:
        """Return what the model reads before its next turn."""
        assert outcome.failure is None, outcome.failure
        return self._tokenizer.decode(outcome.observation.token_ids)


def glue(role: str, text: str) -> str:
    return f"\n<|im_start|>{role}\n{text}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("renderer", [None, RETAINING], ids=["template", "qwen3"])
def test_the_tokens_of_the_engine_are_those_of_the_trace(
    tmp_path: Path, tokenizer: Any, renderer: Any
) -> None:
    """Also where the model tokenizes a text in an unusual way, and where it thinks."""
    configs = [config_of(tokenizer, options={"renderer": renderer} if renderer else {})]
    file = tmp_path / "trace.json"

    async def play(host: Any) -> Game:
        game = Game(host, tokenizer, file=str(file))
        assert await game.open() is None
        assert game.shown(await game.say("than 12", oddly=True)) == glue("user", "higher")
        thought = await game.say("<think>\nhalf of it\n</think>\n\n23")
        assert game.shown(thought) == glue("user", "lower")
        last = await game.say("20")
        assert last.observation.done and last.observation.reward == 1.0
        assert last.observation.metrics == {"found": 1.0}
        return game

    game = with_host(configs, play)
    [branch] = json.loads(file.read_text())
    assert branch["ids"] == game.ids and branch["mask"] == game.mask
    sampled = sum(game.mask)
    assert [one for one in branch["logprobs"] if one][-sampled:] == [LOGPROB] * sampled


def test_calls_of_tools_are_played(tmp_path: Path, tokenizer: Any) -> None:
    """Their text is not rendered again, so the model's way to write JSON stays."""
    options = {"tools": [TOOL], "renderer": {"tool_parser": "qwen3"}}
    file = tmp_path / "trace.json"
    call = '<tool_call>\n{{"name":"compare",  "arguments": {{"guess":{}}}}}\n</tool_call>'

    async def play(host: Any) -> Game:
        game = Game(host, tokenizer, trick="tool", tools=[TOOL], file=str(file))
        assert await game.open() is None
        found = game.shown(await game.say(call.format(13)))
        assert "<tool_response>\nhigher\n</tool_response>" in found
        assert (await game.say(call.format(20))).observation.reward == 1.0
        return game

    game = with_host([config_of(tokenizer, options=options)], play)
    [branch] = json.loads(file.read_text())
    assert branch["ids"] == game.ids and branch["mask"] == game.mask


def test_failures_have_the_kind_that_verifiers_gives(tokenizer: Any) -> None:
    """A reward of 0 would teach the model that it was wrong."""
    forgetting = config_of(tokenizer, options={"renderer": {"name": "qwen3"}})
    sampling = config_of(tokenizer, agent={"sampling": {"temperature": 0.5}})

    async def play(host: Any) -> list[str | None]:
        found = []
        for trick, text in (("harness", "12"), ("reward", "20")):
            game = Game(host, tokenizer, trick, trick=trick)
            assert await game.open() is None
            found.append((await game.say(text)).failure)
        found.append(await Game(host, tokenizer, "other", trick="system").open())
        rendered = Game(host, tokenizer, "rendered")
        assert await rendered.open(1) is None
        found.append((await rendered.say("than 12", oddly=True)).failure)
        return [*found, await Game(host, tokenizer, "sampling").open(2)]

    failures = with_host([config_of(tokenizer), forgetting, sampling], play)
    # reset is tried again for a minute after a failure, which would not help a mistake
    kinds = ["failure", "failure", "exception", "failure", "exception"]
    assert [str(one).partition(":")[0] for one in failures] == kinds
    expected = (
        "HarnessError: harness 'tricky-taskset': RuntimeError: the board is gone",
        "TaskError: task TrickyTask scoring: ValueError: no board",
        "begins with another prompt from token",
        'call 2 of the harness does not continue the sampled.*needs thinking_retention = "all"',
        "the option env sets temperature of model calls",
    )
    for failure, part in zip(failures, expected, strict=True):
        assert re.search(part, failure), failure


@pytest.mark.parametrize("recovery", ["once", "replay"])
def test_an_episode_whose_process_was_killed(tokenizer: Any, recovery: str) -> None:
    async def play(host: Any) -> Any:
        game, other = Game(host, tokenizer), Game(host, tokenizer, "b")
        assert await game.open() is None
        await game.say("than 13", oddly=True)
        for pid in host.process_ids:
            os.kill(pid, signal.SIGKILL)
        outcome = await game.say("25")
        # a new process plays others
        assert await other.open() is None
        assert other.shown(await other.say("12")) == glue("user", "higher")
        return outcome

    outcome = with_host([config_of(tokenizer, recovery=recovery)], play)
    if recovery == "once":
        assert outcome.failure.split(":")[0] in ("lost process", "interrupted")
    else:
        assert tokenizer.decode(outcome.observation.token_ids) == glue("user", "lower")


def test_wrong_settings_are_reported_before_the_run(tokenizer: Any) -> None:
    async def play(host: Any) -> None:
        raise AssertionError("it must not start")

    good = config_of(tokenizer).options
    wrong = {
        "network is false": config_of(tokenizer, network=False),
        "taskset 'absent' not found": config_of(
            tokenizer, options={"env": {"taskset": {"id": "absent"}}}
        ),
        "/absent/model": config_of(tokenizer, options={**good, "model": "/absent/model"}),
        "TrainClientConfig": config_of(tokenizer, options={**good, "renderer": {"name": "absent"}}),
    }
    with pytest.raises(ConfigError) as caught:
        with_host(list(wrong.values()), play)
    for part in wrong:
        assert part in str(caught.value)


def prepare(recipe: Path, file: Path, *num: str) -> list[dict[str, Any]]:
    command = [PYTHON, EXAMPLE / "prepare.py", recipe, file, *num]
    subprocess.run(command, check=True, capture_output=True, timeout=250)
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_prompts_are_the_tasks_of_the_taskset(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    text = (EXAMPLE / "recipe.toml").read_text()
    taskset = '{ id = "guess-taskset", num_tasks = 400 }'
    recipe.write_text(text.replace(taskset, '{ id = "tricky-taskset" }'))
    rows = prepare(recipe, tmp_path / "prompts.jsonl", "3")
    question = {"role": "user", "content": PROMPT}
    assert rows[0]["prompt"] == [{"role": "system", "content": "Play well."}, question]
    assert [row["prompt"] for row in rows[1:]] == [[question]] * 2
    found = load_prompts(
        str(tmp_path / "prompts.jsonl"), check_gold=lambda gold, _: str(gold), with_extra_info=True
    )
    # equal texts with another number are other prompts
    assert [one.extra_info["task"]["number"] for one in found] == [12, 13, 14]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example_is_sampled_by_an_engine(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = prepare(EXAMPLE / "recipe.toml", prompts, "16")
    text = (EXAMPLE / "recipe.toml").read_text()
    text = text.replace("/venvs/verifiers/bin/python", str(PYTHON))
    (tmp_path / "recipe.toml").write_text(text)
    command = [sys.executable, "-m", "megadapo.cli", "rollout", str(tmp_path / "recipe.toml")]
    settings = {
        "run.folder": tmp_path / "run",
        "data.train": prompts,
        "sampling.prompts_per_step": 8,
        "sampling.selection": "all",
        "observe.saved_groups": "all",
    }
    given = [f"--{key}={value}" for key, value in settings.items()]
    subprocess.run([*command, *given], check=True, cwd=REPOSITORY, timeout=800)
    groups = list(read_rollouts(rollouts_path(tmp_path / "run-rollout", 1)))
    responses = [saved.response for group in groups for saved in group.responses]
    assert len(responses) == 64 and {one.finish_reason for one in responses} == {"stop"}
    numbers = {row["extra_info"]["task"]["idx"]: row["extra_info"]["task"] for row in rows}
    for group in groups:
        number = str(numbers[group.prompt.extra_info["task"]["idx"]]["number"])
        for saved in group.responses:
            guess = re.findall("[0-9]+", "".join(saved.tokens[saved.response.actions[-1]]))
            assert saved.score.reward == float(guess[-1:] == [number])
