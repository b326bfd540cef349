"""Check that docstrings and pages are plain English: python tools/check_prose.py [PATH ...]

Docstrings, also those below fields, start with a verb or a noun and have at least three words.
Docstrings and pages avoid some words, and their sentences have at most 40 words.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = (
    *("megadapo/**/*.py", "kernels/**/*.py", "tools/**/*.py", "tests/**/*.py", "examples/**/*.py"),
    *("benchmarks/**/*.py", "README.md", "CONTRIBUTING.md", "docs/**/*.md"),
)
OPENINGS = re.compile(r"(What|Of|Where|Who|Whoever|Whose|Which|How|Nothing|None|By|That|As)\b")
WORDS = re.compile(
    r"\b(whoever|whatever|nobody|anew|begun|lies|lie|goes on|go on|gone on|is told|are told|"
    r"comes to|taken up|take up|at its end|to its end|(?-i:is none|are none)|those that|that of|"
    r"is one that|has it|make way|gets on|homeless|hopeless)\b",
    re.IGNORECASE,
)
MIN_WORDS = 3
MAX_SENTENCE = 40
CODE = re.compile(r"`[^`]*`")
SENTENCE_END = re.compile(r"(?<=[.:;!?])\s+")
NOT_PROSE = ("|", "#", "<", "!", "    ")
"""Beginnings of Markdown lines without sentences: tables, headings, HTML, pictures and code."""

Problem = tuple[int, str, str]
"""Line, problem and text."""


def main(arguments: list[str]) -> int:
    """Print the problems of the given files, or of the project's; return 1 if there are any."""
    paths = [Path(argument) for argument in arguments]
    if not paths:
        paths = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))
    num_problems = 0
    for path in paths:
        find = in_page if path.suffix == ".md" else in_module
        for line, problem, text in find(path.read_text(encoding="utf-8")):
            shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
            print(f"{shown}:{line}: {problem}: {text}")
            num_problems += 1
    return 1 if num_problems else 0


def in_module(source: str) -> Iterator[Problem]:
    """Yield the problems of a module's docstrings."""
    for line, text in docstrings(ast.parse(source)):
        start = " ".join(text.split())[:80]
        if OPENINGS.match(text):
            yield line, "opening", start
        if len(text.split()) < MIN_WORDS:
            yield line, "fragment", start
        yield from in_prose(line, text.split("Args:")[0])


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring and of every string below a field."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value.strip()


def in_page(text: str) -> Iterator[Problem]:
    """Yield the problems of a Markdown page; sentences may span the lines of a paragraph."""
    paragraph: list[str] = []
    is_code = False
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        is_code ^= line.startswith("```")
        is_item = re.match(r"\s*([-*]|\d+\.) ", line) is not None
        is_prose = bool(line.strip()) and not is_code and not line.startswith(("```", *NOT_PROSE))
        if paragraph and (is_item or not is_prose):
            yield from in_prose(number - len(paragraph), "\n".join(paragraph))
            paragraph = []
        if is_prose:
            paragraph.append(line)
        elif not is_code:
            yield from in_words(number, line)


def in_prose(line: int, text: str) -> Iterator[Problem]:
    """Yield the problems of sentences that start at a line."""
    for offset, part in enumerate(text.split("\n")):
        yield from in_words(line + offset, part)
    plain = CODE.sub("code", text)
    for sentence in SENTENCE_END.split(plain):
        if len(sentence.split()) > MAX_SENTENCE:
            yield line, "long sentence", " ".join(sentence.split())[:80]


def in_words(line: int, text: str) -> Iterator[Problem]:
    """Yield the words of a line that have a plainer replacement."""
    for match in WORDS.finditer(CODE.sub("code", text)):
        yield line, f"word {match[0]!r}", text.strip()[:80]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
