"""Calls of the Python tool by text and by tool calls, and its options."""

import pytest

from megadapo.environments.adapters.python_tool import (
    MAX_CODE_BYTES,
    NO_OUTPUT,
    NO_TIME,
    PythonTool,
)
from megadapo.environments.adapters.toolbox import Toolbox
from megadapo.environments.environment import Environment, ToolCall
from tests.unit.environments.adapters.playing import playing, task


def test_calls_by_text_are_answered_by_text() -> None:
    with playing(PythonTool(start="<python>", stop="</python>"), task()) as player:
        assert player.environment.tools == () and player.environment.stop == ("</python>",)
        found = player.turn("I compute. <python>\nx = 6 * 7\nx\n</python>")
        assert (found.text, found.done, found.metrics) == (
            "<result>42</result>",
            False,
            {"calls": 1},
        )
        assert player.turn("<python>x").done, "the turn ended within a call"
        assert player.turn("x</python>").text == ""
        assert player.turn("<python></python>").text == f"<result>{NO_OUTPUT}</result>"
        assert player.turn("<python>3</python>\n\n").text == "<result>3</result>"
        assert player.turn("<python>3</python>!").text == "", "the text behind it may be a name"
        assert player.turn("<python>1<python>2</python>").text == "<result>2</result>"
        assert player.turn("The answer is 42.").done


def test_fenced_code_is_a_call() -> None:
    """The stop text must not be the beginning of the next fence."""
    tool = PythonTool(start="```python\n", stop="```\n", output="```output\n{}\n```\n")
    with playing(tool, task()) as player:
        assert player.turn("So:\n```python\n3 * 3\n```\n").text == "```output\n9\n```\n"
        assert player.turn("```python\n4\n```\n\n").text == "```output\n4\n```\n"
        assert player.turn("So:\n```text\n3 * 3\n```\n").text == ""


def test_mistakes_in_calls_are_told() -> None:
    with playing(PythonTool(), task()) as player:
        assert (
            player.call("bash", code="ls") == 'Error: there is no tool "bash"; the tool is python'
        )
        assert player.call("python") == 'Error: python: argument "code" is missing'
        assert 'there is no argument "lang"' in player.call("python", code="1", lang="js")
        assert 'argument "code" must be {"type": "string"}' in player.call("python", code=["1"])
        assert 'argument "code" must be {"type": "string"}' in player.call("python", code=None)
        assert "was not run" in player.call("python", code="#" * (MAX_CODE_BYTES + 1))
        assert player.call("python", code="#" * (MAX_CODE_BYTES - 2) + "\n1") == "1"
        found = player.turn("", [ToolCall(name="python", arguments={"code": c}) for c in "12"])
        assert [message["content"] for message in found.messages] == ["1", "2"]
        assert found.metrics == {"calls": 2.0} and player.turn("42").done
        (message,) = player.turn("", problem="no JSON").messages
        assert message["content"] == "Error: no JSON"


@pytest.mark.parametrize(
    "tool",
    [PythonTool(seconds=0.3), Toolbox(python={"seconds": 0.3})],
    ids=["alone", "with others"],
)
def test_endless_calls_of_a_turn_share_their_time(tool: Environment) -> None:
    """Together they would exceed the time limit of the step: a failure in place of an answer."""
    calls = [ToolCall(name="python", arguments={"code": "while True: pass"})] * 3
    with playing(tool, task()) as player:
        first, *others = [message["content"] for message in player.turn("", calls).messages]
        assert "the code took longer than 0.3 s" in first and others == [NO_TIME] * 2
        assert player.call("python", code="6 * 7") == "42"


def test_a_call_has_the_time_that_others_left() -> None:
    code = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass"
    calls = [ToolCall(name="python", arguments={"code": code})] * 2
    with playing(PythonTool(seconds=0.6), task()) as player:
        _, second = player.turn("", calls).messages
        assert second["content"] != NO_OUTPUT


def test_schema_is_that_of_the_method() -> None:
    (schema,) = PythonTool().tools
    function = schema["function"]
    assert (function["name"], function["parameters"]["required"]) == ("python", ["code"])
    assert function["parameters"]["properties"]["code"]["type"] == "string"
    assert "kept between calls" in function["description"]


@pytest.mark.parametrize("options", [{"start": "<p>"}, {"stop": "</p>"}, {"output": "{} "}])
def test_options_of_calls_by_text_belong_together(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="options? .*(together|leave it out)"):
        PythonTool(**options)


@pytest.mark.parametrize(
    ("option", "allowed"),
    [
        ({"isolation": "required"}, '"auto" or "require"'),
        ({"seconds": 0}, "a number above 0"),
        ({"seconds": float("nan")}, "a number above 0"),
        ({"seconds": "10"}, "a number above 0"),
        ({"memory_mib": -1}, "a whole number above 0"),
        ({"max_chars": 1.5}, "a whole number above 0"),
    ],
)
def test_wrong_options_are_named(option: dict[str, object], allowed: str) -> None:
    """A misspelled "require" would run code with less isolation than asked for."""
    (name,) = option
    with pytest.raises(ValueError, match=f"option {name} = .* must be {allowed}"):
        PythonTool(**option)
