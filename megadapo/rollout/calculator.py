"""The calculator: arithmetic as Python writes it, read from a syntax tree; nothing is evaluated.

Text that a model wrote can be anything, so everything about it is bounded: its length and
characters before it is parsed, and the size of every number on the way.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterator

from megadapo.rollout.tools import Tool

Number = int | float

MAX_CHARS = 200
"""Longest expression; its nesting is bounded by that too."""
MAX_BITS = 512
"""Largest integer on the way, about 154 digits."""
ERROR = "error"
"""The result of a marked call that is no arithmetic or leaves the bounds."""

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


class Calculator(Tool):
    """Puts the value of an expression behind it."""

    def step(self, text: str) -> str | None:
        """The formatted value of the call that `text` ends with; None where there is no call.

        A marked call that cannot be computed gets "error". Without a mark an expression must
        have an operator, and whatever cannot be computed is no call.
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


def calculate(expression: str) -> str | None:
    """Return the value of an expression with + - * / // % ** and parentheses, as Python prints it.

    None where it is no such expression or a bare number, has no finite value, or is larger than
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
        return None  # MemoryError is how Python's parser refuses what is nested too deeply


def _expressions_before(text: str) -> Iterator[str]:
    """What may be the expression at the end of a text, the longest first."""
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
    """Refused before it is computed where it would be too large."""
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
