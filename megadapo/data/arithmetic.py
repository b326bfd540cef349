"""The built-in task: `a+b+c=?` with two-digit numbers, made from a seed.

It is there so that a small model can learn to reason on a small machine: an answer can be given
directly, or step by step, and only the second way is easy. Train and held-out problems are
disjoint by construction.
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from megadapo.errors import DataError

Split = Literal["train", "held_out"]
Kind = Literal["direct", "steps"]

SCHEME = "arithmetic:"
DATA_SOURCE = "arithmetic"
MIN_TERM, MAX_TERM = 10, 99
# One sum in ten, in every order of its terms, is never trained on.
HELD_OUT_PERIOD = 10
# Half of what the smaller split holds: drawing distinct problems by rejection stays fast.
MAX_PROBLEMS = 32_768


@dataclass(frozen=True)
class Problem:
    """One sum of three two-digit numbers."""

    a: int
    b: int
    c: int

    @property
    def text(self) -> str:
        """What the model is asked."""
        return f"{self.a}+{self.b}+{self.c}=?"

    @property
    def answer(self) -> int:
        """The right answer."""
        return self.a + self.b + self.c

    @property
    def split(self) -> Split:
        """The only split this problem can be drawn for; the order of the terms plays no part."""
        key = "+".join(str(term) for term in sorted((self.a, self.b, self.c)))
        digest = hashlib.sha256(key.encode()).digest()
        return "held_out" if int.from_bytes(digest[:8]) % HELD_OUT_PERIOD == 0 else "train"

    def row(self) -> dict[str, object]:
        """This problem in the schema of DAPO-Math-17k, as a parquet or JSONL row holds it."""
        return {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": self.text}],
            "ability": "MATH",
            "reward_model": {"style": "rule", "ground_truth": str(self.answer)},
            "extra_info": {"index": f"{self.a}+{self.b}+{self.c}", "split": self.split},
        }


def generate(split: str, num_problems: int, seed: int) -> list[Problem]:
    """Draw distinct problems of one split, the same ones for the same arguments.

    A larger `num_problems` extends a smaller one: the first problems stay the same.
    """
    if split not in ("train", "held_out"):
        raise DataError(f"the arithmetic task has no split {split!r}; use train or held_out")
    if not 0 < num_problems <= MAX_PROBLEMS:
        raise DataError(
            f"the arithmetic task can give 1 to {MAX_PROBLEMS} problems a split, not {num_problems}"
        )
    rng = random.Random(f"arithmetic/{split}/{seed}")
    drawn: dict[Problem, None] = {}
    while len(drawn) < num_problems:
        problem = Problem(*(rng.randint(MIN_TERM, MAX_TERM) for _ in range(3)))
        if problem.split == split:
            drawn[problem] = None
    return list(drawn)


def from_source(source: str) -> list[Problem]:
    """Generate what `arithmetic:SPLIT:NUM` or `arithmetic:SPLIT:NUM:SEED` (default 0) names."""
    match = re.fullmatch(r"arithmetic:(\w+):([0-9]{1,9})(?::([0-9]{1,18}))?", source)
    if match is None:
        raise DataError(
            f"{source!r} does not name an arithmetic task; write arithmetic:SPLIT:NUM or "
            "arithmetic:SPLIT:NUM:SEED, for example arithmetic:train:4096"
        )
    split, num_problems, seed = match.groups(default="0")
    return generate(split, int(num_problems), int(seed))


def worked_answer(problem: Problem, rng: random.Random, *, kind: Kind, wrong: bool = False) -> str:
    """Write a response to a problem that ends in an `Answer:` line.

    Args:
        kind: "direct" gives the answer line alone, "steps" adds the two partial sums before it.
        wrong: make one slip of the kind people make (a digit off by a little); a slip in the
            first partial sum is carried through to the answer.
    """
    slip = _slip(rng) if wrong else 0
    if kind == "direct":
        return f"Answer: {problem.answer + slip}"
    slips_early = wrong and rng.random() < 0.5
    first = problem.a + problem.b + (slip if slips_early else 0)
    total = first + problem.c + (0 if slips_early else slip)
    return f"{problem.a}+{problem.b}={first};{first}+{problem.c}={total}\nAnswer: {total}"


def write_parquet(path: Path, problems: list[Problem]) -> None:
    """Export problems as a parquet file in the schema of DAPO-Math-17k."""
    pq.write_table(pa.Table.from_pylist([problem.row() for problem in problems]), path)


def _slip(rng: random.Random) -> int:
    """A non-zero error in the ones or of one ten; never enough to make a sum negative."""
    return rng.choice((-1, 1)) * rng.randint(1, 10)
