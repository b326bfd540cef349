"""The built-in tasks: sums of two-digit numbers such as `12+34+56=?`, made from a seed.

A small model can learn to reason with them on a small machine: an answer can be given directly or
step by step, and only the second way is easy. `arithmetic` has three terms, `arithmetic-chain` 3 to
40, so that a few answers are many times as long as most. `arithmetic-styles` has 3 to 7, and can be
answered in a wordy way too, with the whole remaining sum at each step. Train and held-out problems
are disjoint.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from megadapo.errors import DataError

Split = Literal["train", "held_out"]
Kind = Literal["direct", "steps", "wordy"]

MIN_TERM, MAX_TERM = 10, 99
MIN_CHAIN, MAX_CHAIN = 3, 40
# number of terms in a chain before it is bounded: the mean is 9, one in twenty has 20 or more
MEDIAN_CHAIN, CHAIN_SIGMA = 7.0, 0.65
MAX_STYLES = 7
# running totals have the digits of the largest sum, so that steps have one length
DIGITS = {"arithmetic": 1, "arithmetic-chain": 4, "arithmetic-styles": 3}
# one sum in ten, in every order of its terms, is held out
HELD_OUT_PERIOD = 10
# half of the smaller split of three terms, so that rejection sampling of distinct problems is fast
MAX_PROBLEMS = 32_768


@dataclass(frozen=True)
class Problem:
    """One sum of two-digit numbers."""

    terms: tuple[int, ...]
    task: str = "arithmetic"
    """Name of the task."""

    @property
    def text(self) -> str:
        """The text of the question."""
        return f"{_joined(self.terms)}=?"

    @property
    def answer(self) -> int:
        """The correct answer."""
        return sum(self.terms)

    @property
    def split(self) -> Split:
        """The split of the problem; the order of its terms does not matter."""
        digest = hashlib.sha256(_joined(sorted(self.terms)).encode()).digest()
        return "held_out" if int.from_bytes(digest[:8]) % HELD_OUT_PERIOD == 0 else "train"

    def row(self) -> dict[str, object]:
        """Return the problem as a row in the schema of DAPO-Math-17k."""
        return {
            "data_source": self.task,
            "prompt": [{"role": "user", "content": self.text}],
            "ability": "MATH",
            "reward_model": {"style": "rule", "ground_truth": str(self.answer)},
            "extra_info": {"index": _joined(self.terms), "split": self.split},
        }


def three_terms(rng: random.Random) -> tuple[int, ...]:
    """Draw the terms of an `arithmetic` problem."""
    return tuple(rng.randint(MIN_TERM, MAX_TERM) for _ in range(3))


def chain_terms(rng: random.Random) -> tuple[int, ...]:
    """Draw the terms of an `arithmetic-chain` problem; their number is log-normal.

    Terms are distinct, so the last term added determines the next one.
    """
    num_terms = 0
    while not MIN_CHAIN <= num_terms <= MAX_CHAIN:
        num_terms = round(rng.lognormvariate(math.log(MEDIAN_CHAIN), CHAIN_SIGMA))
    return tuple(rng.sample(range(MIN_TERM, MAX_TERM + 1), num_terms))


def styles_terms(rng: random.Random) -> tuple[int, ...]:
    """Draw the distinct terms of an `arithmetic-styles` problem."""
    return tuple(rng.sample(range(MIN_TERM, MAX_TERM + 1), rng.randint(MIN_CHAIN, MAX_STYLES)))


TASKS: dict[str, Callable[[random.Random], tuple[int, ...]]] = {
    "arithmetic": three_terms,
    "arithmetic-chain": chain_terms,
    "arithmetic-styles": styles_terms,
}
"""Functions that draw the terms of a problem, by the name of the task."""


def generate(
    split: str, num_problems: int, seed: int, *, task: str = "arithmetic"
) -> list[Problem]:
    """Draw distinct problems of one split of a task, the same ones for the same arguments.

    A larger `num_problems` extends a smaller one: the first problems stay the same.
    """
    if split not in ("train", "held_out"):
        raise DataError(f"the {task} task has no split {split!r}; use train or held_out")
    if not 0 < num_problems <= MAX_PROBLEMS:
        raise DataError(
            f"the {task} task has 1 to {MAX_PROBLEMS} problems per split, not {num_problems}"
        )
    draw_terms = TASKS[task]
    rng = random.Random(f"{task}/{split}/{seed}")
    drawn: dict[Problem, None] = {}
    while len(drawn) < num_problems:
        problem = Problem(draw_terms(rng), task)
        if problem.split == split:
            drawn[problem] = None
    return list(drawn)


def is_built_in(source: str) -> bool:
    """Return whether a source names a built-in task, and not a file or folder."""
    name, colon, _ = source.partition(":")
    return bool(colon) and name in TASKS


def from_source(source: str) -> list[Problem]:
    """Generate the problems of `TASK:SPLIT:NUM` or `TASK:SPLIT:NUM:SEED` (default 0)."""
    match = re.fullmatch(r"([a-z-]+):(\w+):([0-9]{1,9})(?::([0-9]{1,18}))?", source)
    if match is None or match[1] not in TASKS:
        raise DataError(
            f"{source!r} does not name an arithmetic task; write arithmetic:SPLIT:NUM or "
            "arithmetic:SPLIT:NUM:SEED, for example arithmetic:train:4096, or the same with "
            "arithmetic-chain or arithmetic-styles"
        )
    task, split, num_problems, seed = match.groups(default="0")
    return generate(split, int(num_problems), int(seed), task=task)


def texts_from_source(source: str) -> list[str]:
    """Generate texts: each problem of `from_source` with its correct answer, without a template.

    About half of the answers are worked out in steps and the others are direct, as in the base
    models of the tasks.
    """
    rng = random.Random(f"texts/{source}")
    kinds: tuple[Kind, ...] = ("direct", "steps")
    return [
        problem.text + worked_answer(problem, rng, kind=rng.choice(kinds))
        for problem in from_source(source)
    ]


def worked_answer(problem: Problem, rng: random.Random, *, kind: Kind, wrong: bool = False) -> str:
    """Write a response to a problem that ends in an `Answer:` line.

    Args:
        kind: "direct" gives the answer line alone, "steps" adds the partial sums before it, "wordy"
            writes the whole remaining sum at each step.
        wrong: make one small error; an error in a partial sum carries over to the answer.
    """
    # an error from -10 to 10 without 0, too small to make a sum negative
    slip = rng.choice((-1, 1)) * rng.randint(1, 10) if wrong else 0
    if kind == "direct":
        return f"Answer: {problem.answer + slip}"
    digits = DIGITS[problem.task]
    total, *others = problem.terms
    slip_at = rng.randrange(len(others)) if wrong else -1
    steps = []
    for number, term in enumerate(others):
        result = total + term + (slip if number == slip_at else 0)
        rest = "".join(f"+{one}" for one in others[number + 1 :]) if kind == "wordy" else ""
        steps.append(f"{total:0{digits}}+{term}{rest}={result:0{digits}}{rest}")
        total = result
    return f"{';'.join(steps)}\nAnswer: {total}"


def _joined(terms: Iterable[int]) -> str:
    return "+".join(map(str, terms))
