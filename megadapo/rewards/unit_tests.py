"""Unit tests as a gold answer, and the program of a response that they test.

The gold answer is Python with assertions about names that the program defines, or JSON:
`{"inputs": [text, ...], "outputs": [text, ...]}`, with the expected output for each text on stdin.
This module only reads them.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from symtable import symtable

from megadapo.errors import DataError

# possessive, so that a long run of spaces or marks is read once; this runs in the driver, where a
# regular expression stops all threads
_FENCE = re.compile(r"^([ \t]*+)(`{3,}+|~{3,}+)[ \t]*+(.*)\n?", re.M)
_PYTHON = ("python", "py", "python3")
_NUMBER = re.compile(r"[-+]?+(?:[0-9]++\.?+[0-9]*+|\.[0-9]++)(?:[eE][-+]?+[0-9]++)?+")
RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-6, 1e-8
_MODULES = {name: name for name in sys.stdlib_module_names} | {"np": "numpy as np"}
"""Modules that tests may use without importing them, as the program often does."""


@dataclass(frozen=True)
class UnitTests:
    """Assertions, or inputs with their expected outputs."""

    assertions: str | None
    inputs: tuple[str, ...] = ("",)
    outputs: tuple[str, ...] = ("",)
    names: tuple[str, ...] = ()
    """Names of the program that the assertions use."""


def read_tests(gold: object) -> UnitTests:
    """Read the tests of a gold answer.

    Raises:
        DataError: the text is neither Python nor such JSON, or holds no tests.
    """
    if not isinstance(gold, str) or not gold.strip():
        raise DataError(f"the gold answer holds no unit tests: {gold!r:.80}")
    if gold.lstrip().startswith("{"):
        return _read_json(gold)
    try:
        tree = ast.parse(gold)
        names, modules = _used_names(gold, tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"the unit tests {gold!r:.80} are not Python: {error}") from None
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise DataError(f"the unit tests {gold!r:.80} assert nothing")
    if not names or (len(names) > 1 and all(hasattr(builtins, name) for name in names)):
        raise DataError(
            f"the unit tests {gold!r:.80} use no name that a program must define, or several that "
            f"Python defines ({', '.join(sorted(names))}) and no other"
        )
    imports = "".join(f"import {_MODULES[name]}\n" for name in sorted(modules))
    return UnitTests(imports + gold, names=tuple(sorted(names)))


def _used_names(tests: str, tree: ast.AST) -> tuple[set[str], set[str]]:
    """Return the names of the program that tests use, and modules that they do not import."""
    tables = [symtable(tests, "<tests>", "exec")]
    for table in tables:
        tables += table.get_children()
    symbols = [one for table in tables for one in table.get_symbols() if one.is_global()]
    own = {one.get_name() for one in symbols if one.is_assigned() or one.is_imported()}
    free = {one.get_name() for one in symbols if not one.get_name().startswith("__")} - own
    # `math` may be one in `math.pi`, and `bisect` is none in `bisect(x)`
    owners = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = {node for node in ast.walk(tree) if isinstance(node, ast.Name)}
    modules = free & _MODULES.keys() - {node.id for node in names - owners}
    built_in = {name for name in free if hasattr(builtins, name)}
    # a program must not replace the `abs` or `all` of the tests of another function
    return free - modules - built_in or built_in, modules


def program_of(response: str) -> str | None:
    """Return the last fenced block of Python in a response; None without one."""
    return last_block(response, _PYTHON)


def last_block(text: str, labels: Collection[str]) -> str | None:
    """Return the last fenced block with one of these labels, else the last one without a label.

    A block begins and ends at a line of its own, and the first word after its beginning is its
    label. A block must end to count. The indentation of its beginning is removed.
    """
    text = text.replace("\r\n", "\n")
    found: dict[bool, tuple[re.Match[str], int]] = {}
    opening: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        indent, mark, info = fence.groups()
        if opening is None:
            # three backticks around words of a line are no fence
            opening = None if mark[0] == "`" and "`" in info else fence
        # one that is indented like code, as in a docstring, is part of the block
        elif not info and mark.startswith(opening[2]) and len(indent) < len(opening[1]) + 4:
            label = opening[3].lower().split()[:1]
            if not label or label[0] in labels:
                found[bool(label)] = opening, fence.start()
            opening = None
    if not found:
        return None
    opening, end = found[max(found)]
    return re.sub(rf"(?m)^[ \t]{{0,{len(opening[1])}}}", "", text[opening.end() : end])


def same_output(printed: str, expected: str, *, is_exact: bool = False) -> bool:
    """Return whether the texts between blanks are equal, decimal numbers within the tolerances.

    With `is_exact`, whether the lines are, without spaces at their ends and final empty lines.
    """
    if is_exact:
        return _lines(printed) == _lines(expected)
    wanted = expected.split()
    # a program may print much more than it should
    found = printed.split(maxsplit=len(wanted))
    return len(found) == len(wanted) and all(map(_same_token, found, wanted))


def _same_token(printed: str, expected: str) -> bool:
    # integers are exact, and may be names
    is_decimal = any(mark in expected for mark in ".eE")
    if not is_decimal or not all(map(_NUMBER.fullmatch, (printed, expected))):
        return printed == expected
    found, wanted = float(printed), float(expected)
    # one that is too large is infinite, and equals all others
    is_close = math.isclose(found, wanted, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
    return printed == expected or (is_close and math.isfinite(found))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _read_json(gold: str) -> UnitTests:
    try:
        entry = json.loads(gold)
        inputs, outputs = entry["inputs"], entry["outputs"]
    except (ValueError, KeyError, RecursionError) as error:
        raise DataError(f"the unit tests {gold!r:.80} cannot be read: {error!r:.80}") from None
    if unknown := entry.keys() - {"inputs", "outputs"}:
        raise DataError(
            f"the unit tests {gold!r:.80} have {', '.join(sorted(unknown))}; only programs that "
            "read stdin are tested with inputs and outputs. Write calls of a function as assertions"
        )
    both = (inputs, outputs)
    if not all(isinstance(one, list) and all(isinstance(t, str) for t in one) for one in both):
        raise DataError(f"the unit tests {gold!r:.80}: inputs and outputs must be lists of texts")
    if len(inputs) != len(outputs) or not inputs:
        raise DataError(f"the unit tests have {len(inputs)} inputs for {len(outputs)} outputs")
    return UnitTests(None, tuple(inputs), tuple(outputs))
