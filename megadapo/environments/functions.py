"""Functions as tools: their type hints and docstrings become the JSON schemas that a model reads.

Needs only the standard library, as it runs in the environment's process.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import re
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from megadapo.environments.environment import (
    Action,
    Environment,
    EnvironmentFailure,
    Observation,
    ToolCall,
)

_SIMPLE: dict[Any, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    None: "null",
    type(None): "null",
    list: "array",
    dict: "object",
}
_SECTION = re.compile(r"^\s*(Args|Arguments|Returns?|Raises|Yields|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"^(\s*)(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True)
class FunctionTool:
    """A function with its JSON schema."""

    name: str
    function: Callable[..., Any]
    hints: Mapping[str, Any]
    """Types of its parameters."""
    required: frozenset[str]
    schema: Mapping[str, Any]

    def problems(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return what is wrong with the arguments of a call, for the model to read."""
        missing = [name for name in self.hints if name in self.required and name not in arguments]
        problems = [f'argument "{name}" is missing' for name in missing]
        for name, value in arguments.items():
            if name not in self.hints:
                problems.append(f'there is no argument "{name}"')
            elif not _fits(value, self.hints[name]):
                expected = json.dumps(_schema_of(self.hints[name]))
                problems.append(f'argument "{name}" must be {expected}, not {json.dumps(value)}')
        return problems


class Functions(Environment):
    """Tools that are functions; a turn without a call ends the episode.

    A function gets the arguments of the call and returns text or JSON values. The model reads its
    own mistakes. An exception is a failure of the environment.
    """

    def __init__(self, functions: Sequence[str]) -> None:
        """`functions`: "MODULE:FUNCTION" of each; coroutine functions are allowed."""
        if isinstance(functions, str):
            raise ValueError('functions must be a list of "MODULE:FUNCTION"')
        self._tools = load_tools(tuple(functions))
        self.tools = [tool.schema for tool in self._tools.values()]

    def step(self, action: Action) -> Observation | Awaitable[Observation]:
        if action.problem:
            return observe([f"Error: {action.problem}"])
        if not action.tool_calls:
            return Observation(done=True)
        called = (self._tools.get(call.name) for call in action.tool_calls)
        if any(tool and inspect.iscoroutinefunction(tool.function) for tool in called):
            return self._run_async(action.tool_calls)
        return observe([self._run(call) for call in action.tool_calls])

    async def _run_async(self, calls: Sequence[ToolCall]) -> Observation:
        answers = []
        for call in calls:
            tool = self._tools.get(call.name)
            if tool is not None and inspect.iscoroutinefunction(tool.function):
                problem = self._mistake(call)
                answers.append(problem or _text_of(tool, await tool.function(**call.arguments)))
            else:
                answers.append(await asyncio.to_thread(self._run, call))
        return observe(answers)

    def _run(self, call: ToolCall) -> str:
        problem = self._mistake(call)
        if problem:
            return problem
        tool = self._tools[call.name]
        try:
            return _text_of(tool, tool.function(**call.arguments))
        except StopIteration as error:
            # asyncio cannot pass it on from a thread
            raise RuntimeError(f"{tool.name} raised StopIteration") from error

    def _mistake(self, call: ToolCall) -> str:
        """Return what is wrong with a call; empty if nothing is."""
        tool = self._tools.get(call.name)
        if tool is None:
            return f'Error: there is no tool "{call.name}"; the tools are {", ".join(self._tools)}'
        problems = tool.problems(call.arguments)
        return f"Error: {tool.name}: {'; '.join(problems)}" if problems else ""


def run_in_thread(
    method: Callable[..., Any], *arguments: Any, **options: Any
) -> asyncio.Future[tuple[Any, BaseException | None]]:
    """Call a method in a thread; return its value and its exception.

    A future cannot hold a StopIteration, and a task must not end with a SystemExit.
    """

    def run() -> tuple[Any, BaseException | None]:
        try:
            return method(*arguments, **options), None
        except BaseException as error:
            # a user's method may raise any exception; the caller raises it again
            return None, error

    return asyncio.get_running_loop().run_in_executor(None, run)


def _text_of(tool: FunctionTool, value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        kind = type(value).__name__
        raise EnvironmentFailure(f"{tool.name} returned a {kind} that is not JSON") from error


def observe(answers: Sequence[str]) -> Observation:
    """Return the answers of tools as an observation."""
    return Observation(messages=[{"role": "tool", "content": answer} for answer in answers])


@cache
def load_tools(paths: tuple[str, ...]) -> dict[str, FunctionTool]:
    """Import functions, and return them as tools by their name.

    Raises:
        ValueError: one is not found or cannot be a tool, or two have one name.
    """
    tools: dict[str, FunctionTool] = {}
    for path in paths:
        module_name, _, name = path.partition(":")
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            # a user's module may raise any exception
            text = f"{type(error).__name__}: {error}"
            raise ValueError(f"{module_name} cannot be imported: {text}") from error
        function = getattr(module, name, None)
        if not callable(function):
            raise ValueError(f"{module_name} has no function {name}")
        if name in tools:
            raise ValueError(f"two functions have the name {name}")
        tools[name] = make_tool(function)
    if not tools:
        raise ValueError("functions is empty")
    return tools


def make_tool(function: Callable[..., Any]) -> FunctionTool:
    """Return a function as a tool with the schema of its type hints and docstring.

    Raises:
        ValueError: a parameter has no type hint, or one without a JSON type.
    """
    name = function.__name__
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        raise ValueError(f"{name}: its type hints cannot be read: {error}") from error
    text, described = _read_docstring(inspect.getdoc(function) or "")
    used, required = {}, []
    properties: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"{name}: a tool gets its arguments by name, so {parameter} cannot be")
        if parameter.name not in hints:
            raise ValueError(f"{name}: the parameter {parameter.name} has no type hint")
        used[parameter.name] = hints[parameter.name]
        try:
            schema = _schema_of(hints[parameter.name])
        except ValueError as error:
            raise ValueError(f"{name}: the parameter {parameter.name} has {error}") from error
        if parameter.name in described:
            schema["description"] = described[parameter.name]
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    schema = {"name": name, "description": text, "parameters": parameters}
    return FunctionTool(
        name, function, used, frozenset(required), {"type": "function", "function": schema}
    )


def _schema_of(hint: Any) -> dict[str, Any]:
    if hint is Any:
        return {}
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema_of(one) for one in inner]}
    if origin is list:
        return {"type": "array", "items": _schema_of(inner[0])}
    if origin is dict and inner[0] is str:
        return {"type": "object", "additionalProperties": _schema_of(inner[1])}
    raise ValueError(f"the type {hint}, which has no JSON schema")


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a JSON value has a type."""
    if hint is Any:
        return True
    if hint in (None, type(None)):
        return value is None
    if hint in (int, float):
        kinds = (int, float) if hint is float else int
        return isinstance(value, kinds) and not isinstance(value, bool)
    if hint in _SIMPLE:
        return isinstance(value, hint)
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if origin is list:
        return isinstance(value, list) and all(_fits(one, inner[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(one, inner[1]) for one in value.values())
    return any(_fits(value, one) for one in inner)


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the text before the first section, and the arguments' descriptions."""
    above: list[str] = []
    arguments: dict[str, str] = {}
    section, indent, name = "", "", ""
    for line in text.splitlines():
        if match := _SECTION.match(line):
            section, indent, name = match[1], "", ""
        elif not section:
            above.append(line)
        elif section.startswith("Arg"):
            match = _ARGUMENT.match(line)
            if match and (not indent or match[1] == indent):
                indent, name = match[1], match[2]
                arguments[name] = match[3]
            elif name:
                arguments[name] = f"{arguments[name]} {line.strip()}".strip()
    return " ".join(" ".join(above).split()), arguments
