"""Functions as tools: schemas, the model's mistakes, and failures that are not the model's."""

from collections.abc import Sequence

import pytest

from megadapo.environments.config import EnvironmentConfig
from megadapo.environments.environment import Action, ToolCall
from megadapo.environments.functions import load_tools, make_tool
from megadapo.errors import ConfigError
from megadapo.rollout.episodes.host import check_environments
from megadapo.rollout.types import SampledTurn
from tests.support.rollout import tool_functions
from tests.support.rollout.hosts import task_of, with_host

MODULE = "tests.support.rollout.tool_functions"


def config_of(*names: str) -> EnvironmentConfig:
    return EnvironmentConfig(
        environment="functions", options={"functions": [f"{MODULE}:{name}" for name in names]}
    )


def answers(*turns: Sequence[tuple[str, object]]):
    """Return the outcome of each turn, which is a list of calls."""

    async def play(host):
        outcomes = []
        for number, turn in enumerate(turns):
            calls = [ToolCall(name=name, arguments=arguments) for name, arguments in turn]
            await host.open(f"{number}", 0, task_of("a"))
            given = SampledTurn("digest", None, Action(text="", tool_calls=calls))
            outcomes.append(await host.step(f"{number}", 0, given))
        return outcomes

    return with_host([config_of("add", "look_up", "numbers", "first")], play)


def texts(outcome) -> list[str]:
    assert outcome.failure is None, outcome.failure
    assert all(message["role"] == "tool" for message in outcome.observation.messages)
    assert not outcome.observation.done
    return [message["content"] for message in outcome.observation.messages]


def test_schema_has_types_descriptions_and_required_arguments():
    (described,) = check_environments([config_of("add")])
    assert described.tools == (
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "Add two numbers. The sum is exact.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "a": {"type": "integer", "description": "first number."},
                        "b": {
                            "type": "integer",
                            "description": "second number, one by default.",
                        },
                    },
                    "required": ["a"],
                },
            },
        },
    )


def test_schema_of_nested_types():
    parameters = make_tool(tool_functions.look_up).schema["function"]["parameters"]
    assert parameters["required"] == ["word"]
    assert parameters["properties"] == {
        "word": {"type": "string"},
        "languages": {
            "anyOf": [{"type": "array", "items": {"enum": ["en", "de"]}}, {"type": "null"}]
        },
        "limit": {"type": "number"},
    }


def test_calls_are_answered_in_their_order():
    """Coroutines and ordinary functions are mixed."""
    calls = [("look_up", {"word": "x", "limit": 2}), ("add", {"a": 2}), ("add", {"a": 2, "b": -3})]
    (outcome,) = answers(calls)
    assert texts(outcome) == ['{"wörd": "x", "languages": null}', "3", "-1"]


MISTAKES = {
    ("subtract", "{}"): 'there is no tool "subtract"; the tools are add, look_up, numbers, first',
    ("add", "{}"): 'add: argument "a" is missing',
    ("add", "{'b': 1, 'c': 2}"): (
        'add: argument "a" is missing; there is no argument "c"'
    ),
    ("add", "{'a': '2'}"): 'add: argument "a" must be {"type": "integer"}, not "2"',
    ("add", "{'a': True}"): 'add: argument "a" must be {"type": "integer"}, not true',
    ("add", "{'a': 2.5}"): 'add: argument "a" must be {"type": "integer"}, not 2.5',
    ("look_up", "{'word': None}"): 'look_up: argument "word" must be {"type": "string"}, not null',
    ("look_up", "{'word': 'x', 'languages': ['fr']}"): 'look_up: argument "languages" must be',
}  # fmt: skip


def test_mistakes_of_the_model_are_observations():
    (outcome,) = answers([(name, eval(arguments)) for name, arguments in MISTAKES])
    for text, expected in zip(texts(outcome), MISTAKES.values(), strict=True):
        assert text.startswith(f"Error: {expected}")


FAILURES = [
    (("look_up", {"word": "absent"}), "exception: KeyError: 'absent' (tool_functions.py, line 31)"),
    (("look_up", {"word": "offline"}), "failure: the dictionary is offline"),
    (("numbers", {"count": 2}), "failure: numbers returned a set that is not JSON"),
]


def test_exceptions_of_a_function_are_failures():
    found = answers(*([call] for call, _ in FAILURES))
    assert [outcome.failure for outcome in found] == [expected for _, expected in FAILURES]
    # beside a coroutine it runs in a thread
    for others in ([], [("look_up", {"word": "x"})]):
        (outcome,) = answers([("first", {"words": []}), *others])
        assert outcome.failure == "exception: RuntimeError: first raised StopIteration"


def test_turn_without_a_call_ends_the_episode():
    (outcome,) = answers([])
    observation = outcome.observation
    assert observation.done
    assert not observation.messages


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["untyped"], "untyped: the parameter a has no type hint"),
        (["many"], "many: a tool gets its arguments by name, so *words: str cannot be"),
        (["of_object"], "the parameter thing has the type <class 'object'>, which has no JSON"),
        (["absent"], "has no function absent"),
        (["add", "add"], "two functions have the name add"),
        ([], "functions is empty"),
    ],
)
def test_functions_that_cannot_be_tools_are_refused(names, expected):
    with pytest.raises(ValueError) as error:
        load_tools(tuple(f"{MODULE}:{name}" for name in names))
    assert expected in str(error.value)


def test_wrong_function_is_refused_before_a_run():
    with pytest.raises(ConfigError) as error:
        check_environments([config_of("untyped")])
    start = "rollout.environments[0] (functions): cannot be created: ValueError: untyped: the param"
    assert str(error.value).startswith(start)
