"""The steps of worked sums: what checks the built-in tasks line by line.

A worked sum of 12+34+56 is `12+34=46;46+56=102` and below it `Answer: 102`, as
`data.arithmetic.worked_answer` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megadapo.rewards.builtin import Messages
from megadapo.rewards.dapo_math import score
from megadapo.rewards.steps import split_steps

SEPARATORS = (";", "\n")
"""What a step ends with."""
_STEP = re.compile(r"\s*([0-9]{1,9})\+([0-9]{1,9})=([0-9]{1,9})[;\s]*")
_ANSWER = re.compile(r"\s*Answer:.*", re.S)


def arithmetic_steps_reward(
    messages: Messages,
    response: str,
    tokens: Sequence[int],
    ground_truth: str,
    extra_info: Mapping[str, Any],
) -> dict[str, Any]:
    """1 or 0 for each step of a worked sum; right is what DAPO's rule says is right.

    A partial sum is right where it adds the next term to the total that was written before it, and
    gets that right: a slip costs its own step, and what is carried through from it no other. An
    answer is right where the rule accepts it. Any other text is wrong, and so is what is added
    after the last term or behind an answer.
    """
    correct = score(response, ground_truth).correct
    terms = [int(term) for term in re.findall("[0-9]+", messages[-1]["content"])]
    texts = split_steps(response, SEPARATORS)
    return {"steps": list(_scores(texts, terms, correct)), "correct": correct}


def _scores(steps: Sequence[str], terms: Sequence[int], correct: bool) -> Iterator[float]:
    total, *ahead = terms
    answered = False
    for step in steps:
        found = _STEP.fullmatch(step)
        if answered or (found is None and not _ANSWER.fullmatch(step)):
            yield 0.0
        elif found is None:
            answered = True
            yield float(correct)
        elif not ahead:
            yield 0.0
        else:
            left, term, written = map(int, found.groups())
            yield float((left, term, written) == (total, ahead.pop(0), left + term))
            total = written
