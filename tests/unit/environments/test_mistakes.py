"""Mistakes in a user's environment: each has a message that names it, before a run if possible."""

import asyncio
import linecache
import os
import re
import venv
from pathlib import Path

import pytest

from megadapo.data.prompts import Prompt
from megadapo.environments.config import EnvironmentConfig
from megadapo.environments.processes import EnvironmentDescription
from megadapo.errors import ConfigError
from megadapo.rollout.episodes.host import EpisodeHost, check_environments
from megadapo.rollout.episodes.requests import EpisodeRequests
from tests.support.rollout import hostile_environments
from tests.support.rollout.hosts import config_of, task_of, turn_of, with_host
from tests.support.rollout.scripted_engines import PlainTokenizer

HEAD = """
from megadapo.environments.environment import Environment, Observation

class Game(Environment):
    def step(self, action):
        return Observation(done=True)
"""
BEFORE_A_RUN = {
    "module": ("import absent_module", {}, "ModuleNotFoundError: No module named 'absent_module'"),
    "syntax": ("def", {}, "cannot be imported: SyntaxError"),
    "exits": ("raise SystemExit('bye')", {}, "cannot be imported: SystemExit: bye"),
    "class": ("del Game", {}, "has no class Game"),
    "function": ("def Game(): pass", {}, "has no class Game"),
    "no subclass": ("class Game: pass", {}, "is not a subclass of megadapo.environments."),
    "no step": ("class Game(Environment): pass", {}, "Game has no method step"),
    "options": ("", {"options": {"low": 1}}, "cannot be created with low: got an unexpected"),
    "needs options": (
        "class Game(Game):\n def __init__(self, low): pass",
        {},
        "cannot be created with no options: missing a required argument: 'low'",
    ),
    "constructor": (
        "class Game(Game):\n def __init__(self): raise ValueError('no table')",
        {},
        "cannot be created: ValueError: no table",
    ),
    "no state": ("", {"recovery": "state"}, 'has no method state and no restore, which recovery ='),
    "tools": ("Game.tools = ['add']", {}, "has tools that are no list of JSON schemas: a list"),
    "stop": ("Game.stop = '</tool>'", {}, "has a stop that is no list of texts: '</tool>'"),
    "python": ("", {"python": "/absent/python"}, "/absent/python: No such file or directory"),
    "crash": ("import os; os._exit(4)", {}, "could not be started 3 times in a row: exit code 4"),
}  # fmt: skip
IN_A_STEP = {
    "None": "step returned None; an environment returns an Observation",
    "'text'": "step returned 'text'; an environment returns an Observation",
    "Observation()": "step returned no messages, no text, no token_ids and done = False",
    "Observation(done='no')": "step returned done = 'no', not True or False",
    "Observation(done=True, reward=None)": "step returned reward = None, not a number",
    "Observation(done=True, reward=float('nan'))": "step returned reward = nan",
    "Observation(done=True, reward=10**400)": "step returned reward = inf",
    "Observation(done=True, metrics={'x': '1'})": "step returned x = '1', not a number",
    "Observation(messages='hello')": "step returned 'hello' as messages, not a list",
    "Observation(messages=['hello'])": "step returned 'hello' as a message, not a dict",
    "Observation(messages=[{'role': 'user'}])": 'step returned a message without "content"',
    "Observation(messages=[{'role': 'system', 'content': 'x'}])": (
        'step returned a message with role = \'system\', not "user" or "tool"'
    ),
    "Observation(messages=[{'role': 'user', 'content': 7}])": (
        "step returned a message with content = 7, not a text"
    ),
    "Observation(messages=[{'role': 'tool', 'content': 'x', 'name': 'add'}])": (
        "step returned a message with 'name'; a message has only role and content"
    ),
    "Observation(text=b'x')": "step returned text = a bytes, not a text",
    "Observation(text='\\ud800')": "step returned text that is not valid Unicode",
    "Observation(text='x', messages=[{'role': 'user', 'content': 'x'}])": (
        "step returned more than one of messages, text and token_ids"
    ),
    "Observation(text='x', token_ids=[])": (
        "step returned more than one of messages, text and token_ids"
    ),
    "Observation(token_ids='12')": "step returned token_ids = '12', not a list of ids",
    "Observation(token_ids=[1, True])": "step returned token_ids = a list, not a list of ids",
    "Observation(token_ids=[1.0])": "step returned token_ids = a list, not a list of ids",
    "Observation(token_ids=[-1])": "step returned a negative token id",
}
IN_OPEN = {
    "def reset(self, task): return 'begin'": (
        "reset returned 'begin'; an environment returns an Observation or None"
    ),
    "def reset(self, task): return Observation(done=True)": "reset returned done = True",
    "def state(self): return {1, 2}": "has state() that is not JSON: Object of type set",
    "def state(self): return float('nan')": "has state() that is not JSON",
    "def state(self): return {1: 'one'}": "has state() that JSON changes",
    "def state(self): return [(1, 2)]": "has state() that JSON changes",
}
SOURCE = hostile_environments.__file__


@pytest.fixture
def game(tmp_path, monkeypatch):
    """Return a function that makes the config of a game whose source is given."""
    monkeypatch.chdir(tmp_path)

    def make(source: str, name: str = "Game", **fields) -> EnvironmentConfig:
        module = f"games_{len(list(tmp_path.glob('games_*.py')))}"
        (tmp_path / f"{module}.py").write_text(HEAD + source)
        return EnvironmentConfig(environment=f"{module}:{name}", **fields)

    return make


def test_all_mistakes_are_listed_before_a_run(game):
    configs = [game(source, **fields) for source, fields, _ in BEFORE_A_RUN.values()]
    right = game("")
    with pytest.raises(ConfigError) as error:
        check_environments([right, *configs])
    problems = str(error.value).splitlines()
    expected = enumerate(zip(problems, configs, BEFORE_A_RUN.values(), strict=True), start=1)
    for index, (problem, config, (_, _, reason)) in expected:
        assert problem.startswith(f"rollout.environments[{index}] ({config.environment}): ")
        assert reason in problem


def test_old_python_is_named(game, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'Unknown option: -P' >&2\nexit 2\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=f": {python} is older than Python 3.11$"):
        check_environments([game("", python=str(python))])


def test_check_returns_tools_and_stop_of_the_created_object(game):
    source = """
class Game(Game):
    def __init__(self, end):
        self.stop = (end,)
        self.tools = [{"type": "function"}]
"""
    one = game(source, options={"end": "</tool>"})
    (described,) = check_environments([one])
    assert described.label == "Game"
    assert described.tools == ({"type": "function"},)
    assert described.stop == ("</tool>",)


def check_data_sources(*entries: list[str], prompts: tuple[str, ...] = ("maths", "code")) -> None:
    described = EnvironmentDescription("calculator", (), ("=",), "{}")
    environments = [
        (EnvironmentConfig(environment="calculator", data_sources=names), described)
        for names in entries
    ]
    requests = EpisodeRequests(environments=environments, tokenizer=PlainTokenizer(), seed=0)
    requests.check([Prompt(name, (("user", "1+1="),), "2", name) for name in prompts], 100)


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([["math"]], "[0] (calculator) has no prompts: none has its data_sources"),
        ([["maths"], ["code", "maths"], ["maths"]], "[2] (calculator) has no prompts: entries"),
        ([[], ["code"]], "[1] (calculator) has no prompts: entries before it take them"),
        ([[], []], "[1] (calculator) has no prompts: entries before it take them"),
    ],
)
def test_entries_without_prompts_are_named_before_a_run(entries, problem):
    """Catches a wrong name, whose prompts are played without tools."""
    with pytest.raises(ConfigError) as error:
        check_data_sources(*entries)
    assert problem in str(error.value) and str(error.value).endswith(
        '; prompts have "maths", "code"'
    )


def test_tools_that_nothing_would_call_are_refused():
    """Catches episodes that end at their first turn, because no parser reads the model's calls."""
    described = EnvironmentDescription(
        "functions", tools=({"type": "function"},), stop=(), output="{}"
    )
    environments = [(EnvironmentConfig(environment="functions"), described)]
    requests = EpisodeRequests(environments=environments, tokenizer=PlainTokenizer(), seed=0)
    with pytest.raises(ConfigError, match='tool_parser: without one no call of "functions"'):
        requests.check([Prompt("one", (("user", "1+1="),), "2", "one")], 100)


def test_one_wrong_data_source_of_several_is_a_warning(caplog):
    """One recipe may have entries for data that a run does not use."""
    check_data_sources(["maths"], ["code"], [])
    assert not caplog.messages
    check_data_sources(["maths", "cod"])
    (message,) = caplog.messages
    assert 'no prompt has "cod"; prompts have "maths", "code"' in message


def test_wrong_observations_fail_the_response_with_their_reason(game):
    source = "\nclass Game(Game):\n def step(self, action): return eval(action.text)"

    async def play(host):
        for number in range(len(IN_A_STEP)):
            await host.open(f"{number}", 0, task_of("a"))
        calls = (host.step(f"{n}", 0, turn_of(text)) for n, text in enumerate(IN_A_STEP))
        return [outcome.failure for outcome in await asyncio.gather(*calls)]

    failures = with_host([game(source)], play)
    for failure, expected in zip(failures, IN_A_STEP.values(), strict=True):
        assert failure.startswith(f"wrong result: {expected}")


def test_wrong_reset_and_state_fail_the_response(game):
    base = "\nclass Game(Game):\n def state(self): return 0\n def restore(self, *_): pass\n "
    configs = [game(base + method, recovery="state") for method in IN_OPEN]

    async def play(host):
        calls = (host.open(f"{n}", n, task_of("a")) for n in range(len(configs)))
        return [opened.failure for opened in await asyncio.gather(*calls)]

    failures = with_host(configs, play)
    for failure, expected in zip(failures, IN_OPEN.values(), strict=True):
        assert failure.startswith(f"wrong result: {expected}")


def test_numbers_of_numpy_are_numbers(game):
    source = """
import numpy
class Game(Game):
    def step(self, action):
        return Observation(done=numpy.bool_(True), reward=numpy.float32(0.5),
                           metrics={"moves": numpy.int64(3)})
"""

    async def play(host):
        await host.open("a", 0, task_of("a"))
        return (await host.step("a", 0, turn_of("x"))).observation

    observation = with_host([game(source)], play)
    assert observation.done is True
    assert (observation.reward, observation.metrics) == (0.5, {"moves": 3.0})


def test_another_python_has_its_own_packages_and_not_megadapos(game, tmp_path):
    """An environment with packages that do not fit megadapo's has a Python of its own."""
    venv.create(tmp_path / "other", symlinks=True)
    python = tmp_path / "other" / "bin" / "python"
    (packages,) = (tmp_path / "other" / "lib").glob("python*/site-packages")
    (packages / "own_package.py").write_text("NAME = 'own'")
    source = """
import importlib.util, sys
import own_package
class Game(Game):
    def step(self, action):
        found = importlib.util.find_spec("pydantic"), importlib.util.find_spec("torch")
        return Observation(text=f"{own_package.NAME} {found} {sys.prefix}")
"""

    async def play(host):
        await host.open("a", 0, task_of("a"))
        return (await host.step("a", 0, turn_of("x"))).observation.text

    text = with_host([game(source, python=str(python))], play)
    assert text == f"own (None, None) {os.path.dirname(os.path.dirname(python))}"


def failures(log_folder: Path, *texts: str) -> list[str | None]:
    """Return the failure of one step of each text, each in an episode of its own."""

    async def play() -> list[str | None]:
        host = EpisodeHost([config_of("Obedient")], None, log_folder)
        try:
            await host.start()
            host.begin(0, "")
            found = []
            for number, text in enumerate(texts):
                await host.open(f"{number}", 0, task_of("a"))
                found.append((await host.step(f"{number}", 0, turn_of(text))).failure)
            return found
        finally:
            await host.stop()

    return asyncio.run(play())


def test_exception_names_the_users_line_that_it_passed_last(tmp_path):
    """Catches the line of a library, and one of megadapo's own files."""
    texts = ["raise no table", "parse {", "socket", "fail full"]
    raised, parsed, forbidden, failed = failures(tmp_path, *texts)
    sources = {raised: "raise ValueError(text)", parsed: "json.loads(text)", forbidden: "socket("}
    for failure, source in sources.items():
        name, line = re.search(r" \((\S+), line (\d+)\)$", failure).groups()
        assert name == Path(SOURCE).name
        assert source in linecache.getline(SOURCE, int(line))
    assert parsed.startswith("exception: JSONDecodeError: Expecting property name")
    assert failed == "failure: full"


def test_prints_of_an_environment_are_in_its_log(tmp_path):
    failures(tmp_path, "print many words", "say hello")
    assert "many words" in (tmp_path / "environment-Obedient.log").read_text()
