"""The steps of a response: where they end, in its text and among its tokens."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from megadapo.observe.rollouts.token_pieces import Decode, token_pieces

if TYPE_CHECKING:
    import numpy as np

StepScore = Literal["min", "mean", "last", "product", "sum"]

COMBINE: dict[StepScore, Callable[[Sequence[float]], float]] = {
    "min": min,
    "mean": lambda scores: sum(scores) / len(scores),
    "last": lambda scores: scores[-1],
    "product": math.prod,
    "sum": sum,
}
"""What makes one score of those of a response's steps."""


def split_steps(text: str, separators: Sequence[str]) -> list[str]:
    """Cut a text behind its separators into steps, at least one, which joined are the text.

    Where two separators match, the longer one does. What is blank between two of them begins the
    next step, and what is blank at the end belongs to the last.
    """
    longest_first = sorted(separators, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
    steps: list[str] = []
    begin = after = 0  # of the step, and behind the latest separator
    for found in pattern.finditer(text):
        if text[after : found.start()].strip():
            steps.append(text[begin : found.end()])
            begin = found.end()
        after = found.end()
    if text[after:].strip() or not steps:
        return [*steps, text[begin:]]
    return [*steps[:-1], steps[-1] + text[begin:]]


def step_ends(
    text: str, token_ids: np.ndarray, separators: Sequence[str], decode: Decode
) -> list[int] | None:
    """How many tokens of a response there are to the end of each step of its text.

    A token across two steps belongs to the one that ends in it; the last step has all that is left,
    as the end-of-sequence token. None where decoding goes back on what it gave before, so that no
    token can be told to be of a step.

    Args:
        token_ids: [n] int32.
    """
    pieces = token_pieces(decode, token_ids.tolist(), text)
    if "".join(pieces) != text:
        return None
    num_shown = list(accumulate(map(len, pieces)))
    in_text = accumulate(map(len, split_steps(text, separators)))
    inner = [bisect_left(num_shown, end) + 1 for end in list(in_text)[:-1]]
    return [*inner, len(token_ids)]
