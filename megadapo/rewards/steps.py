"""The steps of a response: their ends in its text and among its tokens."""

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
"""Function that combines the scores of a response's steps into one."""


def split_steps(text: str, separators: Sequence[str]) -> list[str]:
    """Split a text after its separators into one or more steps; joined, they are the text.

    If two separators match, the longer one is taken. Blank text between two separators starts the
    next step, and blank text at the end belongs to the last step.
    """
    longest_first = sorted(separators, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
    steps: list[str] = []
    begin = after = 0  # start of the step, and end of the latest separator
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
    """Return the number of tokens up to the end of each step of a response's text.

    A token across two steps belongs to the one that ends in it. The last step has all remaining
    tokens, such as the end-of-sequence token. The result is None if decoding changes earlier text,
    since tokens then cannot be assigned to steps.

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
