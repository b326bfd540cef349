"""The text tools "calculator" and "mark", and the arithmetic of the calculator."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable

from megadapo.environments.adapters.calls import OUTPUT, TextTool
from megadapo.environments.environment import Action, Observation


class Calculator(TextTool):
    """A tool that returns the value of an expression, in Python's notation.

    A call that cannot be computed gets "error". With `start = ""` only a computable expression with
    an operator before the stop text is a call.
    """

    def __init__(
        self, *, start: str = "<calculator>", stop: str = "</calculator>", output: str = OUTPUT
    ) -> None:
        super().__init__(start=start, stop=stop, output=output)

    def step(self, action: Action) -> Observation:
        if self.has_ended(action.text):
            return Observation(done=True)
        if not self._start:
            before = self.text_before_stop(action.text)
            return self.result(None if before is None else value_before(before))
        call = self.call_in(action.text)
        return self.result(None if call is None else calculate(call) or ERROR)


class Mark(TextTool):
    """A tool with an empty output, which only marks where responses can branch."""

    def __init__(self, *, stop: str) -> None:
        super().__init__(start="", stop=stop, output="{}")

    def step(self, action: Action) -> Observation:
        if self.has_ended(action.text):
            return Observation(done=True)
        return self.result(None if self.text_before_stop(action.text) is None else "")


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


def value_before(text: str) -> str | None:
    """Return the value of the longest expression at the end of a text; None without one."""
    line = text[-MAX_CHARS:].rstrip(" ")
    found = _EXPRESSION.search(line)
    words = found[0].split(" ") if found else []
    values = (calculate(" ".join(words[first:])) for first in range(len(words)))
    return next((value for value in values if value is not None), None)


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
