r"""DAPO's string rules, which decide whether a mathematical answer is right.

Scores equal those of DAPO's own scorer (verl, utils/reward_score/math_dapo.py). Only the end of the
response counts, both answers are normalised with the rules of Minerva (arXiv 2206.14858, appendix
D.1), and equal strings score +1, all others -1. The rules evaluate nothing, so no response can run
code or take long.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal
from unicodedata import category

from megadapo.data.group import NO_ANSWER, Score
from megadapo.errors import DataError

Rule = Literal["answer", "boxed", "answer_or_boxed"]
"""Place of the answer.

answer: the last `Answer:` line, normalised (what the published DAPO run used).
boxed: the last complete \\boxed{...}, compared verbatim.
answer_or_boxed: `answer`, and `boxed` if there is no such line (verl since August 2026).
"""

ANSWER_WINDOW = 300
"""Characters at the end of a response that are searched for an answer."""
BOXED_WINDOW = 100
"""Characters at the end of a response that are searched for a boxed answer."""
MAX_GROUND_TRUTH = 4096
"""Longest gold answer in characters, since normalising takes quadratic time."""

_ANSWER_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")

# The three tables are applied from first to last: a replacement can complete a later pattern, so
# the order is part of the rule.
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units"),
    r"\ldots",
    *("sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds"),
    *("meters", "meals", "edges", "students", "childrentickets", "multiples"),
    r"\text{s}",
    r"\text{.}",
    "\\text{\ns}",
    r"\text{}^2",
    r"\text{}^3",
    "\\text{\n}",
    r"\text{}",
    r"\mathrm{th}",
    r"^\circ",
    r"^{\circ}",
    r"\;",
    r",\!",
    "{,}",
    '"',
    r"\dots",
)
_REWRITTEN = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # if a line contains mathematics, only the first $...$ is the answer
        (r".*?\$(.*?)\$.*", r"$\1$"),
        (r"\\text\{(.*?)\}", r"\1"),
        (r"\\textbf\{(.*?)\}", r"\1"),
        (r"\\overline\{(.*?)\}", r"\1"),
        (r"\\boxed\{(.*)\}", r"\1"),
        # TeX shorthand: \frac12 and \sqrt3
        (r"frac([^{])(.)", r"frac{\1}{\2}"),
        (r"sqrt([^{])", r"sqrt{\1}"),
    )
)


def score(response: str, ground_truth: str, rule: Rule = "answer") -> Score:
    """Score a response against its gold answer."""
    tail = response[-ANSWER_WINDOW:]
    answer = NO_ANSWER
    expected = ground_truth
    if rule != "boxed":
        answer = normalize(_answer_line(tail) or NO_ANSWER)
        expected = _normalized_ground_truth(ground_truth)
    if rule == "boxed" or (rule == "answer_or_boxed" and answer == NO_ANSWER):
        boxed = _last_boxed(tail[-BOXED_WINDOW:])
        if boxed is not None:
            answer, expected = boxed, ground_truth
        elif rule == "boxed":
            return Score(-1.0, False, NO_ANSWER)
    correct = answer == expected
    return Score(1.0 if correct else -1.0, correct, answer)


def extract_answer(response: str, rule: Rule = "answer") -> str | None:
    """Return the verbatim answer at the place where `score` looks for it."""
    tail = response[-ANSWER_WINDOW:]
    answer = None if rule == "boxed" else _answer_line(tail)
    return answer if answer or rule == "answer" else _last_boxed(tail[-BOXED_WINDOW:])


def normalize(answer: str) -> str:
    """Normalise an answer for the comparison."""
    answer = answer.rsplit("=", 1)[-1]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for expression in _REMOVED:
        answer = answer.replace(expression, "")
    for pattern, replacement in _REWRITTEN:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    without_commas = answer.replace(",", "")
    return (without_commas if without_commas.isdigit() else answer).strip()


def ground_truth_problem(gold: str, rule: Rule) -> str | None:
    """Return why no response, or every response, would match a gold answer; None if it is fine."""
    if not gold.strip():
        return "it is empty"
    if len(gold) > ANSWER_WINDOW:
        return f"it has {len(gold)} characters, and an answer at most {ANSWER_WINDOW}"
    if any(category(char) in ("Cc", "Cs") and char not in "\t\n" for char in gold):
        return "it contains control characters or is not valid Unicode"
    if rule != "boxed" and normalize(gold) in ("", NO_ANSWER):
        return "it is empty after normalisation"
    written = f"\\boxed{{{gold}}}" if rule == "boxed" else f"Answer: {gold}"
    if not score(written, gold, rule).correct:
        return f"a response that ends in {written!r} would be marked wrong under rule {rule!r}"
    return None


@lru_cache(maxsize=65_536)
def _normalized_ground_truth(ground_truth: str) -> str:
    if len(ground_truth) > MAX_GROUND_TRUTH:
        raise DataError(
            f"a gold answer has {len(ground_truth)} characters; at most {MAX_GROUND_TRUTH} "
            "can be scored"
        )
    return normalize(ground_truth)


def _answer_line(tail: str) -> str | None:
    lines = _ANSWER_LINE.findall(tail)
    return lines[-1] if lines else None


def _last_boxed(tail: str) -> str | None:
    r"""Return the content of the last \boxed{...}, or None if its braces do not close."""
    before, opening, rest = tail.rpartition(r"\boxed{")
    if not opening:
        return None
    depth = 1
    for position, char in enumerate(rest):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return rest[:position]
    return None
