"""The base of environments that are one tool, which the model calls by text or by a tool call.

By text: the model writes START call STOP, generation stops, the output is appended, and the same
turn continues. By tool calls: the model's own format, which vLLM's parser reads. Results are
messages of the role "tool", which the model answers in its next turn.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from megadapo.environments.environment import Action, Environment, Observation, ToolCall
from megadapo.environments.functions import make_tool

OUTPUT = "<result>{}</result>"
"""Default of the option `output`."""


MAX_OPTION = 1e9
"""Limit of options in seconds, MiB or characters; the system cannot wait much longer than this."""


def require_positive(kind: type[int] | type[float], **options: float) -> None:
    """Refuse options that are no number of this kind above zero and below `MAX_OPTION`.

    Raises:
        ValueError: names the first of them.
    """
    for name, value in options.items():
        is_number = isinstance(value, int | kind) and not isinstance(value, bool)
        if not is_number or not 0 < value < MAX_OPTION:
            number = "a whole number" if kind is int else "a number"
            limits = f"above 0 and below {MAX_OPTION:g}"
            raise ValueError(f"the option {name} = {value!r} must be {number} {limits}")


class TextTool(Environment):
    """A tool that is called by text. Its episode ends with a turn that nothing has stopped.

    Args:
        start: text that starts a call; the last one in the turn counts.
        stop: text that ends a call.
        output: text that is appended after a call; {} stands for the result.
    """

    _allows_blanks = False
    """Whether blanks of the last token after the stop text are allowed."""

    def __init__(self, *, start: str, stop: str, output: str = OUTPUT) -> None:
        if not stop:
            raise ValueError("the option stop is empty: set the text that ends a call")
        if output.count("{}") != 1:
            raise ValueError(
                f"the option output = {output!r} must contain {{}} once, in the place of the result"
            )
        self.stop: Sequence[str] = (stop,)
        self.output, self._start, self._stop = output, start, stop

    def has_ended(self, text: str) -> bool:
        """Return whether the turn has ended, as nothing stopped it.

        An action begins after the last observation, so it has no earlier stop text.
        """
        return self._stop not in text

    def text_before_stop(self, text: str) -> str | None:
        """Return the text before the stop text; None if the stop text ends inside a token."""
        before, _, rest = text.rpartition(self._stop)
        return before if not (rest.strip() if self._allows_blanks else rest) else None

    def call_in(self, text: str) -> str | None:
        """Return the text between the last start text and the stop text; None if it is no call."""
        before = self.text_before_stop(text)
        _, mark, call = (before or "").rpartition(self._start)
        return call if mark else None

    def result(self, result: str | None) -> Observation:
        """Return the observation of a call's result; None: the text was no call."""
        if result is None:
            return Observation(text="", is_call=False)
        # other braces stay
        return Observation(text=self.output.replace("{}", result), metrics={"calls": 1.0})


class Tool(TextTool):
    """A tool that is called by text if `start` and `stop` are given, and else by tool calls.

    Args:
        function: coroutine function that returns the result of a call, also for mistakes of the
            model. Its first parameter is a text, and the only one of a call by text. Type hints
            and docstring become the schema.
        start: text that starts a call.
        stop: text that ends a call.
        output: text that is appended after a call by text.
    """

    # "</python>" often ends with a token that has a newline, too
    _allows_blanks = True

    def __init__(
        self,
        function: Callable[..., Awaitable[str]],
        *,
        start: str = "",
        stop: str = "",
        output: str = OUTPUT,
    ) -> None:
        if bool(start) != bool(stop):
            raise ValueError("the options start and stop belong together: set both, or neither")
        if output != OUTPUT and not stop:
            raise ValueError("the option output is used only with start and stop; leave it out")
        self._function = function
        self._is_text = bool(stop)
        if self._is_text:
            super().__init__(start=start, stop=stop, output=output)
        else:
            self._tool = make_tool(function)
            self.tools: Sequence[Mapping[str, Any]] = (self._tool.schema,)

    def begin_turn(self) -> None:
        """Begin a turn, whose calls share the limits of the tool."""

    async def step(self, action: Action) -> Observation:
        """Answer all calls of a turn, in order; a turn without calls ends the episode."""
        self.begin_turn()
        return await self.answer(action)

    async def answer(self, action: Action) -> Observation:
        """Answer calls of the current turn."""
        if self._is_text:
            if self.has_ended(action.text):
                return Observation(done=True)
            text = self.call_in(action.text)
            return self.result(None if text is None else await self._function(text))
        if action.problem:
            results = [f"Error: {action.problem}"]
        else:
            results = [await self._call(call) for call in action.tool_calls]
        return Observation(
            messages=tuple({"role": "tool", "content": result} for result in results),
            done=not results,
            metrics={"calls": float(len(action.tool_calls))} if results else {},
        )

    async def _call(self, call: ToolCall) -> str:
        """Return the result of a call, or what is wrong with it."""
        name = self._tool.name
        if call.name != name:
            return f"Error: there is no tool {json.dumps(call.name)}; the tool is {name}"
        if problems := self._tool.problems(call.arguments):
            return f"Error: {name}: {'; '.join(problems)}"
        return await self._function(**call.arguments)
