"""Answers that compute nothing, for every dataset of reasoning-gym; needs the package.

Run with PYTHONHASHSEED=0 and the number of items of each dataset.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from reasoning_gym.factory import DATASETS

from megadapo.data.reasoning_gym import REFUSED, Item
from megadapo.rewards.rules import marked_answer
from megadapo.rewards.workers.reasoning_gym_worker import make

WORDS = ("yes", "no", "true", "false", "none", "null", "infeasible", "impossible", "empty", "x")
NUMBERS = ("0", "1", "-1", "2", "24", "0.01", "0.5", "1/2", "1e999", "nan", "inf", "-inf", "nanj")
SHAPES = ('""', "''", "[]", "{}", "()", "[[]]", "[0]", "{0}", ",", ".", "-", "A", "C", "\n")
LISTS = tuple(f"[{', '.join(['NaN'] * num)}]" for num in range(1, 11))
PROGRAMS = (
    *("6*4*1*1", "9**9**9**9", "oracle_answer", "entry['answer']", "answer", "solution"),
    *("Integral(x, x)", "(lambda: 0)()", "[].__class__", "exit()"),
)
LONG = ("word " * 400, "0 " * 400, "UDLR" * 100, "A" * 400, "the answer is hard to find")
CONSTANTS = ("", " ", *WORDS, *NUMBERS, *SHAPES, *LISTS, *PROGRAMS, *LONG)


def main() -> None:
    """Print the faults of each dataset as a line of JSON."""
    num = int(sys.argv[1])
    for name in sorted(DATASETS.keys() - REFUSED.keys()):
        with contextlib.redirect_stdout(sys.stderr):
            faults = [*_faults(name, num)]
        for fault in faults:
            print(json.dumps([name, *fault]))
    print("done")


def _faults(name: str, num: int) -> Iterator[tuple[str, str]]:
    """Yield refused golds, and answers that are right on an item with another gold."""
    made = [make(Item(name, {}, 7, num, index)) for index in range(num)]
    golds = [entry["answer"] or "" for _, entry in made]
    # boards with few queens have solutions in common
    others = () if name == "n_queens" else golds
    for gold, (scorer, entry) in zip(golds, made, strict=True):
        # sympy finds no integral of some items, and their golds name it
        if gold and "Integral(" not in gold and not _is_correct(scorer, gold, gold):
            yield "gold refused", gold
        question = entry["question"]
        given = (question, question.splitlines()[0], *_derived(entry["metadata"]))
        for text in (*CONSTANTS, *given, *others):
            if not _same(text, gold) and _is_correct(scorer, text, gold):
                yield text, gold


def _derived(metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yield texts that have the package compute the answer, or that repeat the question."""
    if "integrand" in metadata:
        yield f"Integral({metadata['integrand']}, {metadata['variable']})"
        yield f"integrate({metadata['integrand']}, {metadata['variable']})"
    if "polynomial_expr" in metadata:
        yield metadata["polynomial_expr"]
        yield f"expand({metadata['polynomial_expr']})"


def _is_correct(scorer: Callable[[str], float], text: str, gold: str) -> bool:
    answer = marked_answer(f"<answer>{text}</answer>", gold)
    # scorers raise anything, which scores 0
    with contextlib.suppress(Exception):
        return bool(answer) and scorer(answer) == 1.0
    return False


def _same(text: str, gold: str) -> bool:
    """Return whether an answer is the gold answer in another spelling."""
    answer = marked_answer(f"<answer>{text}</answer>", gold)
    with contextlib.suppress(ValueError):
        return math.isclose(float(answer.replace(",", "")), float(gold.replace(",", "")))
    return "".join(answer.split()).lower() == "".join(gold.split()).lower()
