"""Tools that a response may call while it is written, and the `[rollout.tools]` section.

The model writes a call, which ends with a stop string. The engine appends the tool's output, and
the model continues. Tokens of the output are part of the response but no samples: they have the
policy version NO_VERSION, no log-prob and no loss.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Literal

from pydantic import PositiveInt

from megadapo.section import Section


class ToolsConfig(Section, title="rollout.tools"):
    """The tool that responses may call, in training and in evaluation."""

    tool: Literal["calculator", "mark"] | None = None
    """Name of the tool; none: no tool. calculator: arithmetic in Python's notation. mark: an empty
    output, so that responses can branch after the stop string."""
    start: str = "<calculator>"
    """Text that starts a call; "" takes the expression before the stop string."""
    stop: str = "</calculator>"
    """Text that ends a call."""
    output: str = "<result>{}</result>"
    """Text that is appended after a call; {} stands for the result."""
    max_calls: PositiveInt = 8
    """Calls of a response that get an output; later ones get none."""
    max_output_tokens: PositiveInt = 64
    """Longest output of a call, in tokens; the rest is cut off."""
    max_turn_tokens: PositiveInt | None = None
    """Tokens that a response may generate before its first call, between two calls and after the
    last one. One that needs more is truncated. None: no limit but the response's own."""

    def output_of(self, result: str) -> str:
        """Return the text to append after a call with this result; other braces stay."""
        return self.output.replace("{}", result)

    def conflicts(self) -> Iterator[str]:
        if self.tool is None and (unused := self.changed()):
            keys = ", ".join(f"rollout.tools.{name}" for name in unused)
            yield f"{keys}: used only with rollout.tools.tool; leave it out"
        if not self.stop:
            yield "rollout.tools.stop is empty: set the text that ends a call"
        if self.output.count("{}") != 1:
            yield (
                f"rollout.tools.output = {self.output!r} must contain {{}} once, in the place of "
                "the result"
            )


class Tool(ABC):
    """A source of outputs; one object serves all responses of an engine.

    `step` depends on the text alone: a restarted engine repeats calls, and branches start in the
    middle of a response. It runs in the engine's event loop, so it must be fast, and it must not
    raise for any text that a model can write.
    """

    stop_strings: tuple[str, ...]
    """Texts after which generation stops and `step` is called."""

    def __init__(self, config: ToolsConfig) -> None:
        self._config = config
        self.stop_strings = (config.stop,)

    def start(self) -> None:  # noqa: B027 - most tools need nothing
        """Acquire what the tool needs; called before the first step."""

    @abstractmethod
    def step(self, text: str) -> str | None:
        """Return the output for a response that ends with a stop string; None if it is no call."""

    def stop(self) -> None:  # noqa: B027
        """Release what `start` has acquired; called after the last step."""


class Mark(Tool):
    """A tool with empty output, which only marks where responses can branch."""

    def step(self, text: str) -> str | None:
        return "" if text.endswith(self._config.stop) else None


class Calculator(Tool):
    """A tool that returns the value of an expression."""

    def step(self, text: str) -> str | None:
        """Return the formatted value of the call at the end of `text`; None if it is no call.

        A call with a start text that cannot be computed gets "error". Without a start text, only
        a computable expression with an operator is a call.
        """
        config = self._config
        if not text.endswith(config.stop):
            return None
        before = text[: -len(config.stop)]
        if not config.start:
            results = (calculate(part) for part in _expressions_before(before))
            result = next((found for found in results if found is not None), None)
            return None if result is None else config.output_of(result)
        _, mark, call = before.rpartition(config.start)
        return config.output_of(calculate(call) or ERROR) if mark else None


TOOLS: dict[str, type[Tool]] = {"calculator": Calculator, "mark": Mark}
"""Tools by their name in rollout.tools.tool."""

Number = int | float

# a model can write any text, so everything about it is bounded: its length and characters before
# it is parsed, and then the size of every number; the syntax tree is read, never evaluated
MAX_CHARS = 200
"""Longest expression, which also bounds its nesting."""
MAX_BITS = 512
"""Largest integer in a computation, about 154 digits."""
ERROR = "error"
"""Result of a call that is not arithmetic or exceeds the bounds."""

_EXPRESSION = re.compile(r"[0-9+\-*/%(). ]+\Z")
_LEADING_ZEROS = re.compile(r"(?<![0-9.])0+(?=[0-9])")
_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str | None:
    """Return the value of an expression with + - * / // % ** and parentheses, as Python prints it.

    Return None for any other text, for a bare number, and if the value is not finite or exceeds
    the bounds. Numbers may have leading zeros.
    """
    if len(expression) > MAX_CHARS or not _EXPRESSION.match(expression):
        return None
    try:
        tree = ast.parse(_LEADING_ZEROS.sub("", expression).strip(), mode="eval").body
        if not any(isinstance(node, ast.BinOp) for node in ast.walk(tree)):
            return None
        return repr(_value(tree))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None  # Python's parser raises MemoryError for deep nesting


def _expressions_before(text: str) -> Iterator[str]:
    """Yield the possible expressions at the end of a text, the longest first."""
    line = text[-MAX_CHARS:].rstrip(" ")
    found = _EXPRESSION.search(line)
    words = found[0].split(" ") if found else []
    for first in range(len(words)):
        yield " ".join(words[first:])


def _value(node: ast.AST) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number):
            return _bounded(number)
        case ast.UnaryOp(op=op, operand=operand):
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(op=ast.Pow(), left=left, right=right):
            return _bounded(_power(_value(left), _value(right)))
        case ast.BinOp(op=op, left=left, right=right):
            return _bounded(_BINARY[type(op)](_value(left), _value(right)))
    raise ValueError("not arithmetic")


def _power(base: Number, exponent: Number) -> Number:
    """Raise before computing a power that would be too large."""
    both_whole = isinstance(base, int) and isinstance(exponent, int)
    if both_whole and abs(base) > 1 and abs(exponent) * int(base).bit_length() > 2 * MAX_BITS:
        raise ValueError("too large")
    return _BINARY[ast.Pow](base, exponent)


def _bounded(number: Number) -> Number:
    if isinstance(number, int) and number.bit_length() <= MAX_BITS:
        return number
    if isinstance(number, float) and math.isfinite(number):
        return number
    raise ValueError("complex, infinite or too large")
