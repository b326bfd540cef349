"""The built-in tasks: sums of two-digit numbers such as `12+34+56=?`, made from a seed.

They are there so that a small model can learn to reason on a small machine: an answer can be given
directly, or step by step, and only the second way is easy. `arithmetic` has three terms,
`arithmetic-chain` 3 to 40, so that a few answers are many times as long as most. Train and held-out
problems are disjoint by construction.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from megadapo.errors import DataError

Split = Literal["train", "held_out"]
Kind = Literal["direct", "steps"]

MIN_TERM, MAX_TERM = 10, 99
MIN_CHAIN, MAX_CHAIN = 3, 40
# Of the number of terms in a chain, before it is bounded: the mean is 9, one in twenty has 20.
MEDIAN_CHAIN, CHAIN_SIGMA = 7.0, 0.65
# Running totals of a chain have all digits of the largest sum, so that steps are equally long.
CHAIN_DIGITS = 4
# One sum in ten, in every order of its terms, is never trained on.
HELD_OUT_PERIOD = 10
# Half of what the smaller split of three terms holds: drawing distinct problems by rejection stays
# fast.
MAX_PROBLEMS = 32_768


@dataclass(frozen=True)
class Problem:
    """One sum of two-digit numbers."""

    terms: tuple[int, ...]
    task: str = "arithmetic"
    """Name of the task it was drawn for."""

    @property
    def text(self) -> str:
        """What the model is asked."""
        return f"{_joined(self.terms)}=?"

    @property
    def answer(self) -> int:
        """The right answer."""
        return sum(self.terms)

    @property
    def split(self) -> Split:
        """The only split this problem can be drawn for; the order of the terms plays no part."""
        digest = hashlib.sha256(_joined(sorted(self.terms)).encode()).digest()
        return "held_out" if int.from_bytes(digest[:8]) % HELD_OUT_PERIOD == 0 else "train"

    def row(self) -> dict[str, object]:
        """This problem in the schema of DAPO-Math-17k, as a parquet or JSONL row holds it."""
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
    """Draw the terms of an `arithmetic-chain` problem; their number is log-normal, like lengths.

    No term comes twice, so that the one to be added next follows from the last one added.
    """
    num_terms = 0
    while not MIN_CHAIN <= num_terms <= MAX_CHAIN:
        num_terms = round(rng.lognormvariate(math.log(MEDIAN_CHAIN), CHAIN_SIGMA))
    return tuple(rng.sample(range(MIN_TERM, MAX_TERM + 1), num_terms))


TASKS: dict[str, Callable[[random.Random], tuple[int, ...]]] = {
    "arithmetic": three_terms,
    "arithmetic-chain": chain_terms,
}
"""How each task draws the terms of a problem, by the name that its sources begin with."""


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
            f"the {task} task can give 1 to {MAX_PROBLEMS} problems a split, not {num_problems}"
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
    """Whether a source begins like that of a built-in task, and so is no file or folder."""
    name, colon, _ = source.partition(":")
    return bool(colon) and name in TASKS


def from_source(source: str) -> list[Problem]:
    """Generate what `TASK:SPLIT:NUM` or `TASK:SPLIT:NUM:SEED` (default 0) names."""
    match = re.fullmatch(r"([a-z-]+):(\w+):([0-9]{1,9})(?::([0-9]{1,18}))?", source)
    if match is None or match[1] not in TASKS:
        raise DataError(
            f"{source!r} does not name an arithmetic task; write arithmetic:SPLIT:NUM or "
            "arithmetic:SPLIT:NUM:SEED, for example arithmetic:train:4096, or the same with "
            "arithmetic-chain"
        )
    task, split, num_problems, seed = match.groups(default="0")
    return generate(split, int(num_problems), int(seed), task=task)


def texts_from_source(source: str) -> list[str]:
    """What `from_source` names as texts: each problem with its right answer, in no template.

    Every second answer or so is worked out in steps, and the others are direct: the two ways in
    which the base models of the tasks answer.
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
        kind: "direct" gives the answer line alone, "steps" adds the partial sums before it.
        wrong: make one slip of the kind people make (a digit off by a little); a slip in a
            partial sum is carried through to the answer.
    """
    slip = _slip(rng) if wrong else 0
    if kind == "direct":
        return f"Answer: {problem.answer + slip}"
    digits = CHAIN_DIGITS if problem.task == "arithmetic-chain" else 1
    total, *others = problem.terms
    slip_at = rng.randrange(len(others)) if wrong else -1
    steps = []
    for number, term in enumerate(others):
        result = total + term + (slip if number == slip_at else 0)
        steps.append(f"{total:0{digits}}+{term}={result:0{digits}}")
        total = result
    return f"{';'.join(steps)}\nAnswer: {total}"


def write_parquet(path: Path, problems: list[Problem]) -> None:
    """Export problems as a parquet file in the schema of DAPO-Math-17k."""
    pq.write_table(pa.Table.from_pylist([problem.row() for problem in problems]), path)


def _slip(rng: random.Random) -> int:
    """A non-zero error in the ones or of one ten; never enough to make a sum negative."""
    return rng.choice((-1, 1)) * rng.randint(1, 10)


def _joined(terms: Iterable[int]) -> str:
    return "+".join(map(str, terms))
