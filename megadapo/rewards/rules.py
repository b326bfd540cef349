"""The rules of `reward.rule`, which compare a response with its gold answer as strings.

No rule evaluates anything, and the time of each is linear in the length of the response.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Literal, get_args

from megadapo.data.group import NO_ANSWER, Score
from megadapo.data.patterns import last_match
from megadapo.errors import DataError
from megadapo.rewards import dapo_math

Rule = Literal["answer", "boxed", "answer_or_boxed", "last_number", "exact_text", "pattern"]
"""Place of the answer, and the comparison.

answer, boxed, answer_or_boxed: the rules of `dapo_math`.
last_number: the last number of the response, compared as a number. If it is an operand, as the 2
of 1/2, there is no number to compare.
exact_text: the last lines of the response, as many as the gold answer has, compared verbatim.
pattern: the match of `reward.pattern`, compared as a number or verbatim.
"""
MATHEMATICAL: tuple[str, ...] = get_args(dapo_math.Rule)
"""Rules whose answers the symbolic comparison finds too."""
MAX_ANSWER = 300
"""Characters of an answer that a score keeps."""

_SIGNS = "-\u2212\u2013"
"""Minus, also as MINUS SIGN and EN DASH."""
_NUMBER = re.compile(
    rf"(?:(?<![\w)\]])[{_SIGNS}])?"  # a sign, unless it subtracts
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?<![\w.])(?=\.[0-9]))(?:\.[0-9]+)?"
)
# LaTeX has a backslash before the dollar
_NEGATIVE_AMOUNT = re.compile(rf"([{_SIGNS}])\\?[$€£](?=\.?[0-9])")
# the blank in "x = - 5" and "$- 5$", where nothing is there to subtract from
_SIGN_AND_BLANK = re.compile(rf"((?:\A|[=({{][ \t]?|[$])[{_SIGNS}])[ \t](?=\\?[$€£]?\.?[0-9])")
_OPERAND = re.compile(
    # right of an operator, as in 1/2, 2^10 and 3 \\cdot 4, or the index or exponent of a number
    r"(?:[\w)\]}][ \t]{0,3}[/^÷]|[0-9)\]}][ \t]{0,3}(?:[+·×]|\\times|\\cdot|\\div|(?<!\*)\*)"
    r"|[0-9)\]}]\*\*|[0-9)\]}] \*\* |(?<![A-Za-z])\w_|[0-9][eE]|√|sqrt"
    # in a fraction or root of LaTeX
    r"|\\[dt]?frac ?(?:\{[^{}]{0,40}\}|[0-9])?)[ \t]{0,3}[({]?[ \t]{0,3}[-+]?\Z"
)
_BEFORE = 64
"""Characters before a number that are searched for an operator."""
_LATEX_COMMA = re.compile(r"(?<=[0-9])(?:\{,\}|\\,)(?=[0-9]{3}(?![0-9]))")
_ANSWER = re.compile(r"(?i)\bAnswer\s{0,8}:")


def score(response: str, ground_truth: str, rule: Rule, pattern: str | None = None) -> Score:
    """Score a response against its gold answer: +1 if it is correct, else -1.

    `pattern`: `reward.pattern`, for that rule.
    """
    if rule == "answer" or rule == "boxed" or rule == "answer_or_boxed":
        return dapo_math.score(response, ground_truth, rule)
    expected, answer = ground_truth.strip(), _answer(response, ground_truth, rule, pattern)
    if answer is None:
        return Score(-1.0, False, NO_ANSWER)
    correct = answer == expected
    if rule != "exact_text" and not correct:
        number = as_number(answer)
        correct = number is not None and number == as_number(expected)
    if rule != "exact_text":
        # as it was compared, so that votes for 5 and 5.0 are for one answer
        answer = as_number(answer) or answer
    return Score(1.0 if correct else -1.0, correct, answer[:MAX_ANSWER])


def validate_ground_truth(gold: object, rule: Rule = "answer") -> str:
    """Return a gold answer that the rule can score, unchanged.

    Raises:
        DataError: no response, or every response, would match this gold; the error says why.
    """
    if not isinstance(gold, str):
        kind = type(gold).__name__
        raise DataError(f"the gold answer is not a string but {kind} {gold!r:.80}")
    problem = None
    if rule == "answer" or rule == "boxed" or rule == "answer_or_boxed":
        problem = dapo_math.ground_truth_problem(gold, rule)
    elif not gold.strip():
        problem = "it is empty"
    elif len(gold) > dapo_math.MAX_GROUND_TRUTH:
        problem = f"it has more than {dapo_math.MAX_GROUND_TRUTH} characters"
    elif rule == "last_number" and as_number(gold) is None:
        problem = (
            "it is no number, as rule 'last_number' needs; data.columns.ground_truth_pattern can "
            "find the number in it"
        )
    elif rule == "pattern" and "\n" in gold.strip():
        problem = "it has several lines, and rule 'pattern' looks at one"
    if problem is not None:
        raise DataError(f"the gold answer {gold!r:.80} cannot be scored: {problem}")
    return gold


def as_number(text: str) -> str | None:
    """Return the one spelling of a text that is a number, None for another text."""
    text = text.strip()
    if _NUMBER.fullmatch(text) is None:
        return None
    sign = "-" if text[0] in _SIGNS else ""
    whole, _, decimals = text.lstrip(_SIGNS).replace(",", "").partition(".")
    whole, decimals = whole.lstrip("0") or "0", decimals.rstrip("0")
    spelling = f"{whole}.{decimals}" if decimals else whole
    return spelling if spelling == "0" else sign + spelling


def marked_answer(response: str, ground_truth: str) -> str:
    """Return the answer that a response marks, or else its end; it may be empty.

    The text of the last `<answer>` ... `</answer>` is marked; else the text after the last
    `Answer:`, up to the end of its line, or of the response if that line has no other text. If the
    gold answer is a number, the last number of the marked text, or of the response, is the answer.
    Without a mark it is the last lines, as many as the gold answer has.
    """
    before, end, _ = response.rpartition("</answer>")
    _, start, marked = before.rpartition("<answer>")
    if not (start and end):
        last = deque(_ANSWER.finditer(response), maxlen=1)
        line, _, further = response[last[0].end() :].partition("\n") if last else ("", "", "")
        marked = line.strip(" \t*") or further
    marked = marked.strip()
    if as_number(ground_truth) is not None:
        return _answer(marked or response, ground_truth, "last_number", None) or marked
    return marked or _answer(response, ground_truth, "exact_text", None) or ""


def _answer(response: str, ground_truth: str, rule: Rule, pattern: str | None) -> str | None:
    """Return the answer that a rule compares, None without one."""
    if rule == "last_number":
        numbers = _SIGN_AND_BLANK.sub(r"\1", _LATEX_COMMA.sub("", response))
        # the sign of -$5 belongs to its number
        amounts = _NEGATIVE_AMOUNT.sub(r"\1", numbers)
        last = deque(_NUMBER.finditer(amounts), maxlen=1)
        if not last:
            return None
        begin, end = last[0].span()
        is_operand = _OPERAND.search(amounts[max(0, begin - _BEFORE) : begin])
        return None if is_operand or amounts[end:].lstrip(" ").startswith("^") else last[0][0]
    if rule == "exact_text":
        num_lines = ground_truth.strip().count("\n") + 1
        return "\n".join(response.strip().rsplit("\n", num_lines)[-num_lines:]).strip() or None
    assert pattern is not None, "reward.pattern"
    found = last_match(pattern, response)
    return None if found is None else found.strip()
