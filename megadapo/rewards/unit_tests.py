"""Unit tests as a gold answer, and the program of a response that they test.

The gold answer is Python with assertions, which runs after the program, or JSON:
`{"inputs": [text, ...], "outputs": [text, ...]}`, with the expected output for each text on stdin.
This module only reads them.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection
from dataclasses import dataclass

from megadapo.errors import DataError

# possessive, so that a long run of spaces or marks is read once; this runs in the driver, where a
# regular expression stops all threads
_FENCE = re.compile(r"^([ \t]*+)(`{3,}+|~{3,}+)[ \t]*+(.*)\n?", re.M)
_PYTHON = ("python", "py", "python3")


@dataclass(frozen=True)
class UnitTests:
    """Assertions, or inputs with their expected outputs."""

    assertions: str | None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    @property
    def num_runs(self) -> int:
        """Number of runs of a program that passes all tests."""
        return len(self.inputs) if self.assertions is None else 1


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
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"the unit tests {gold!r:.80} are not Python: {error}") from None
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise DataError(f"the unit tests {gold!r:.80} assert nothing")
    return UnitTests(gold)


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


def same_output(printed: str, expected: str) -> bool:
    """Return whether two outputs are equal, ignoring spaces at line ends and final empty lines."""
    return _lines(printed) == _lines(expected)


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
