"""Tools of an episode: each call goes to its own tool, and mistakes are observed."""

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megadapo.environments.adapters.calculator import MAX_CHARS, Calculator, Mark, calculate
from megadapo.environments.adapters.toolbox import Toolbox
from megadapo.environments.config import EnvironmentConfig
from megadapo.environments.environment import Action, Environment, Observation, Task, ToolCall
from megadapo.environments.results import ProtocolViolation
from megadapo.rollout.episodes.host import EpisodeHost
from tests.support.rollout.hosts import MODULE, task_of, turn_of, with_host
from tests.unit.environments.adapters.playing import playing, task

COUNTER = f"{__name__}:Counter"
BEGINNER, OTHER = f"{__name__}:Beginner", f"{__name__}:Other"
NO_CALL = Observation(text="", is_call=False)
END = Observation(done=True)


class Counter(Environment):
    """A tool of a user, which keeps a number and ends the episode at three."""

    tools = ({"type": "function", "function": {"name": "count", "parameters": {}}},)

    def __init__(self, *, step_size: int = 1) -> None:
        self.size, self.number, self.is_closed = step_size, -1, False

    def reset(self, task: Task) -> None:
        self.number = 0

    def step(self, action: Action) -> Observation:
        self.number += self.size
        message = {"role": "tool", "content": str(self.number)}
        done = self.number >= 3
        return Observation(messages=[message], reward=0.5, done=done, metrics={"counted": 1.0})

    def close(self) -> None:
        self.is_closed = True


class Threaded(Counter):
    """Notes the threads of its calls; the first step waits for another one."""

    threads: set[threading.Thread] = set()
    both = threading.Barrier(2, timeout=5)

    def reset(self, task: Task) -> None:
        self.threads.add(threading.current_thread())

    def step(self, action: Action) -> Observation:
        if action.text == "stop":
            raise StopIteration
        self.both.wait()
        return super().step(action)

    def close(self) -> None:
        self.threads.add(threading.current_thread())


class Beginner(Counter):
    """A tool with a first observation, whose close fails."""

    def __init__(self, *, name: str, **begin: Any) -> None:
        super().__init__()
        self.tools = ({"type": "function", "function": {"name": name, "parameters": {}}},)
        self.begin = begin

    def reset(self, task: Task) -> Observation:
        return Observation(reward=0.5, metrics={"begun": 1.0}, **self.begin)

    def close(self) -> None:
        super().close()
        raise ValueError("no server")


class Other(Beginner):
    """A second class, as each tool has a name of its own."""


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    row = {"id": "1", "title": "Answer", "text": "The answer is 42."}
    (tmp_path / "corpus.jsonl").write_text(json.dumps(row))
    return str(tmp_path / "corpus.jsonl")


def test_texts_go_to_the_tool_whose_stop_text_they_end_with(corpus: str) -> None:
    """ARPO's episodes: a search engine and a Python interpreter."""
    toolbox = Toolbox(
        python={"start": "<python>", "stop": "</python>"},
        search={"start": "<search>", "stop": "</search>", "corpus": corpus},
    )
    with playing(toolbox, task()) as player:
        assert toolbox.stop == ["</python>", "</search>"] and toolbox.tools == []
        found = player.turn("<search>answer</search>")
        assert found.text == "<result>[1] Answer\nThe answer is 42.</result>"
        assert found.metrics == {"search/calls": 1.0}
        assert player.turn("<python>x = 42</python>").text == "<result>(no output)</result>"
        assert player.turn("<python>x / 2</python>").text == "<result>21.0</result>"
        assert player.turn("<python>x</search>").text == ""
        assert player.turn("The answer is 21.").done


def test_the_longest_stop_text_counts() -> None:
    toolbox = Toolbox(mark={"stop": ">"}, calculator={"start": "<c>", "stop": "</c>"})
    with playing(toolbox, task()) as player:
        assert player.turn("<c>1+1</c>").text == "<result>2</result>"
        assert player.turn("x>").metrics == {"mark/calls": 1.0}


def test_tool_calls_of_a_turn_are_answered_in_order(corpus: str) -> None:
    toolbox = Toolbox(python={}, search={"corpus": corpus}, **{COUNTER: {"step_size": 2}})
    calls = [
        ToolCall(name="count", arguments={}),
        ToolCall(name="python", arguments={"code": "6 * 7"}),
        ToolCall(name="browse", arguments={"url": "x"}),
        ToolCall(name="search", arguments={"query": "answer", "num": "1"}),
    ]
    with playing(toolbox, task()) as player:
        names = [tool["function"]["name"] for tool in toolbox.tools]
        assert names == ["python", "search", "count"]
        found = player.turn("text", calls)
        assert [message["content"] for message in found.messages] == [
            "2",
            "42",
            'Error: there is no tool "browse"; the tools are python, search, count',
            'Error: search: argument "num" must be {"type": "integer"}, not "1"',
        ]
        assert (found.reward, found.done) == (0.5, False)
        counted = {f"{COUNTER}/counted": 1.0, "python/calls": 1.0, "search/calls": 1.0}
        assert found.metrics == counted
        found = player.turn("", [calls[0], calls[0]])
        assert (found.reward, found.done, found.metrics[f"{COUNTER}/counted"]) == (1.0, True, 2.0)
        assert player.turn("").done
        (message,) = player.turn("", problem="no JSON").messages
        assert message["content"] == "Error: no JSON"
        (message,) = player.turn("", [ToolCall(name="\ud800", arguments={})]).messages
        assert message["content"].startswith('Error: there is no tool "\\ud800"')
    assert toolbox._members[COUNTER].is_closed


def test_first_observations_are_joined_and_all_tools_closed() -> None:
    """Catches a rule of a game that the model never reads, and a container that stays."""
    first, second = ({"role": "user", "content": text} for text in ("Begin.", "Play."))
    members = {
        BEGINNER: {"name": "a", "messages": [first]},
        COUNTER: {},
        OTHER: {"name": "b", "messages": [second]},
    }

    async def play() -> None:
        box = Toolbox(**members)
        found = await box.reset(task())
        assert (found.messages, found.reward) == ([first, second], 1.0)
        assert found.metrics == {f"{BEGINNER}/begun": 1.0, f"{OTHER}/begun": 1.0}
        with pytest.raises(ValueError, match="no server"):
            await box.close()
        assert all(one.is_closed for one in box._members.values())
        assert await Toolbox(**{COUNTER: {}}).reset(task()) is None
        with pytest.raises(ProtocolViolation, match="text or token_ids"):
            await Toolbox(**{BEGINNER: {"name": "a", "text": "x"}}).reset(task())

    asyncio.run(play())


def test_methods_that_are_no_coroutines_run_in_threads() -> None:
    """Catches a slow function that stops all episodes of its process."""
    name = f"{__name__}:Threaded"

    async def play() -> None:
        boxes = [Toolbox(**{name: {}}) for _ in range(2)]
        call = ToolCall(name="count", arguments={})
        for box in boxes:
            await box.reset(task())
        await asyncio.gather(*(box.step(Action(text="", tool_calls=[call])) for box in boxes))
        with pytest.raises(RuntimeError, match="StopIteration"):
            await boxes[0].step(Action(text="stop", tool_calls=[call]))
        for box in boxes:
            await box.close()

    asyncio.run(play())
    assert Threaded.threads and threading.main_thread() not in Threaded.threads


def test_calls_wait_for_a_thread_outside_of_their_time_limit() -> None:
    """An evaluation calls all tools at once; those behind the first ones would all fail."""

    async def play(host: EpisodeHost) -> list[Any]:
        names = [f"e{number}" for number in range(160)]
        await asyncio.gather(*(host.open(name, 0, task_of(name)) for name in names))
        return await asyncio.gather(*(host.step(name, 0, turn_of("go")) for name in names))

    options = {f"{MODULE}:SlowText": {}}
    # of 512 MiB a process has 16 threads for calls
    config = EnvironmentConfig(environment="tools", options=options, memory_mib=512, timeout_s=1.5)
    assert {outcome.failure for outcome in with_host([config], play)} == {None}


def test_tools_that_cannot_be_told_apart_are_refused(corpus: str) -> None:
    with pytest.raises(ValueError, match="same stop text or the same name"):
        Toolbox(mark={"stop": "</c>"}, calculator={"stop": "</c>"})
    with pytest.raises(ValueError, match="same stop text or the same name"):
        Toolbox(**{"python": {}, "megadapo.environments.adapters.python_tool:PythonTool": {}})


def call(text: str) -> Observation:
    """Return the observation of a call whose output is this text."""
    return Observation(text=text, metrics={"calls": 1.0})


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12+34", "46"),
        (" (2 - 5) * 3 ", "-9"),
        ("7/2", "3.5"),
        ("6/2", "3.0"),
        ("-7//2", "-4"),
        ("17 % 5", "2"),
        ("2**10", "1024"),
        ("2**-1", "0.5"),
        ("0046+007", "53"),
        ("1.05*100", "105.0"),
        ("10.05+0.5", "10.55"),
    ],
)
def test_values_equal_pythons(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "46", "-46", "+", "12+", "(1+2", "1 2", "1.2.3+4", "2(3+4)", "1+-"),
        *("1/0", "5%0", "(-8)**0.5", "10**400*1.0", "1e5+1", "True+1", "__import__('os')+1"),
        *("9**9**9**9", "2**(10**9)", "(-3)**99999", "9" * 199 + "*9", "2.0**9999"),
        *("(" * 100 + "1+1" + ")" * 97, "1" + "+1" * MAX_CHARS, "１+１", "1+1\n", "0**-1"),
    ],
)
def test_other_texts_have_no_value_and_cost_no_time(text):
    """An exception would end the engine, and a tower of powers would block it."""
    start = time.perf_counter()
    assert calculate(text) is None
    assert time.perf_counter() - start < 0.5


@pytest.mark.parametrize(
    ("text", "with_start", "without"),
    [
        ("<calculator>2*(3+4)</calculator>", "14", "14"),
        ("<calculator>1<calculator>2+3</calculator>", "5", "5"),
        ("<calculator>rm -rf</calculator>", "error", None),
        ("<calculator></calculator>", "error", None),
        ("<calculator>１+１</calculator>", "error", None),
        ("2+3</calculator>", None, "5"),
        ("</calculator>", None, None),
        ("<calculator>1+1</calculator><result>2</result> 3", None, None),
        ("<calculator>1+1</calculator></calculator>", "error", None),
        ("12+34=</calculator>", None, None),
    ],
)
def test_calls_are_found_before_the_stop_text(text, with_start, without):
    for start, result in (("<calculator>", with_start), ("", without)):
        calculator = Calculator(start=start, output='{"result": {}}')
        expected = NO_CALL if result is None else call(f'{{"result": {result}}}')
        assert calculator.step(Action(text=text)) == expected


@pytest.mark.parametrize("text", ["<calculator>1+1", "", "2+3"])
def test_turn_without_the_stop_text_is_the_end(text):
    assert Calculator().step(Action(text=text)) == END


def test_mark_observes_nothing_after_its_stop_text_and_ends_with_the_turn() -> None:
    mark = Mark(stop=";")
    assert mark.stop == (";",)
    assert mark.step(Action(text="46;")) == call("")
    assert mark.step(Action(text="46; and")) == NO_CALL
    assert mark.step(Action(text="46")) == END


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": ""}, "stop is empty"),
        ({"output": "{}{}"}, "must contain {} once"),
        ({"output": "result"}, "must contain {} once"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Calculator(**options)
