"""The built-in tasks, whose properties the quickstart and the measurements of long tails need."""

import itertools
import random
import re
from collections.abc import Iterable

import pyarrow.parquet as pq
import pytest

from megadapo.data import arithmetic
from megadapo.data.arithmetic import Problem, generate, worked_answer
from megadapo.errors import DataError
from megadapo.rewards.dapo_math import score
from tests.support.rows import write_parquet

RECORDED_TRAIN = ["81+99+34=?", "53+44+60=?", "82+51+15=?"]
RECORDED_HELD_OUT = ["88+95+50=?", "31+93+61=?", "77+99+38=?"]
RECORDED_CHAINS = [
    "48+51+60+70+80=?",
    "18+86+21+78+24+79=?",
    "46+64+23+66+74+40+91+34+48+70+20+73=?",
]
TASKS = tuple(arithmetic.TASKS)


def sums_in_any_order(problems: Iterable[Problem]) -> set[tuple[int, ...]]:
    return {tuple(sorted(problem.terms)) for problem in problems}


@pytest.mark.parametrize("task", TASKS)
def test_splits_are_disjoint_in_any_order_of_terms(task: str) -> None:
    train = sums_in_any_order(generate("train", 8192, seed=0, task=task))
    held_out = sums_in_any_order(generate("held_out", 2048, seed=1, task=task))
    assert len(train) > 7000 and len(held_out) > 1500
    assert not train & held_out


def test_splits_agree_between_tasks() -> None:
    train = sums_in_any_order(generate("train", 8192, seed=0))
    chains = generate("held_out", 8192, seed=0, task="arithmetic-chain")
    assert not train & sums_in_any_order(chains)


def test_held_out_share_is_one_in_ten() -> None:
    # A split that is (nearly) empty or (nearly) everything would still be disjoint.
    sums = [Problem(terms) for terms in itertools.combinations_with_replacement(range(10, 40), 3)]
    share = sum(problem.split == "held_out" for problem in sums) / len(sums)
    assert share == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("task", TASKS)
def test_problems_depend_on_the_seed_alone(task: str) -> None:
    problems = generate("train", 1000, seed=7, task=task)
    assert problems == generate("train", 1000, seed=7, task=task)
    assert problems[:100] == generate("train", 100, seed=7, task=task)
    assert problems[:100] != generate("train", 100, seed=8, task=task)
    assert len(set(problems)) == 1000
    assert all(10 <= term <= 99 for problem in problems for term in problem.terms)
    assert {problem.row()["data_source"] for problem in problems} == {task}


def test_problems_are_recorded() -> None:
    # Recorded: a changed generator would silently make runs and results incomparable.
    assert [p.text for p in generate("train", 3, seed=0)] == RECORDED_TRAIN
    assert [p.text for p in generate("held_out", 3, seed=0)] == RECORDED_HELD_OUT
    chains = generate("train", 3, seed=0, task="arithmetic-chain")
    assert [p.text for p in chains] == RECORDED_CHAINS


def test_chain_lengths_have_a_long_tail() -> None:
    assert {len(problem.terms) for problem in generate("train", 1000, seed=0)} == {3}
    chains = generate("train", 16_384, seed=0, task="arithmetic-chain")
    nums = sorted(len(problem.terms) for problem in chains)
    assert (nums[0], nums[-1]) == (3, 40)
    mean, p50, p95 = sum(nums) / len(nums), nums[len(nums) // 2], nums[len(nums) * 19 // 20]
    assert p50 == 7 and 8 < mean < 9.5 and 18 < p95 < 22
    # which term comes next follows from the last one only where none comes twice
    assert all(len(set(problem.terms)) == len(problem.terms) for problem in chains)


def test_worked_chains_have_30_to_500_tokens() -> None:
    # Counted as the shipped tokenizers do: a digit or sign is a token, words are few.
    rng = random.Random(0)
    for num_terms, low, high in ((3, 30, 31), (7, 80, 90), (40, 500, 515)):
        for _ in range(50):
            terms = tuple(rng.sample(range(10, 100), num_terms))
            text = worked_answer(Problem(terms, "arithmetic-chain"), rng, kind="steps")
            assert low <= len(re.findall(r"\d|[^\d\s]+|\s", text)) <= high


@pytest.mark.parametrize("kind", ["direct", "steps", "wordy"])
@pytest.mark.parametrize("task", TASKS)
def test_worked_answers_are_scored_correctly(kind: arithmetic.Kind, task: str) -> None:
    rng = random.Random(0)
    for problem in generate("train", 300, seed=0, task=task):
        gold = problem.row()["reward_model"]["ground_truth"]
        assert score(worked_answer(problem, rng, kind=kind), gold).correct
        wrong = score(worked_answer(problem, rng, kind=kind, wrong=True), gold)
        assert not wrong.correct and wrong.answer.isdecimal()


@pytest.mark.parametrize("task", TASKS)
def test_steps_show_every_sum_and_carry_errors(task: str) -> None:
    rng = random.Random(1)
    slips = set()
    for problem in generate("train", 200, seed=3, task=task):
        for wrong in (False, True):
            work, answer = worked_answer(problem, rng, kind="steps", wrong=wrong).split("\n")
            sums = [part.split("=") for part in work.split(";")]
            lefts = [tuple(map(int, left.split("+"))) for left, _ in sums]
            rights = [int(right) for _, right in sums]
            assert answer == f"Answer: {rights[-1]}"
            assert [a for a, _ in lefts] == [problem.terms[0], *rights[:-1]]
            assert [b for _, b in lefts] == list(problem.terms[1:])
            wrong_at = [i for i, left in enumerate(lefts) if sum(left) != rights[i]]
            assert len(wrong_at) == wrong
            slips.update(wrong_at)
    places = {"arithmetic": 2, "arithmetic-chain": 10, "arithmetic-styles": 6}[task]
    assert slips >= set(range(places))


def test_direct_answers_are_shorter() -> None:
    problem, rng = Problem((12, 34, 56)), random.Random(0)
    assert worked_answer(problem, rng, kind="direct") == "Answer: 102"
    assert worked_answer(problem, rng, kind="steps") == "12+34=46;46+56=102\nAnswer: 102"
    chain = Problem((12, 34, 56), "arithmetic-chain")
    padded = "0012+34=0046;0046+56=0102\nAnswer: 102"
    assert worked_answer(chain, rng, kind="steps") == padded
    words = "012+34+56=046+56;046+56=102\nAnswer: 102"
    styles = Problem((12, 34, 56), "arithmetic-styles")
    assert worked_answer(styles, rng, kind="wordy") == words


def test_rows_have_the_columns_of_dapo_math_17k(tmp_path) -> None:
    problems = generate("held_out", 5, seed=0)
    write_parquet(tmp_path / "sums.parquet", problems)
    rows = pq.read_table(tmp_path / "sums.parquet").to_pylist()
    assert rows == [problem.row() for problem in problems]
    assert rows[0]["prompt"] == [{"role": "user", "content": problems[0].text}]
    assert rows[0]["reward_model"]["ground_truth"] == str(problems[0].answer)
    assert rows[0]["extra_info"]["index"] == problems[0].text.removesuffix("=?")


def test_source_has_split_number_and_seed() -> None:
    assert arithmetic.from_source("arithmetic:train:20") == generate("train", 20, seed=0)
    assert arithmetic.from_source("arithmetic:held_out:20:5") == generate("held_out", 20, seed=5)
    chains = generate("train", 20, seed=5, task="arithmetic-chain")
    assert arithmetic.from_source("arithmetic-chain:train:20:5") == chains


def test_is_built_in() -> None:
    assert all(map(arithmetic.is_built_in, ("arithmetic:", "arithmetic-chain:train:1")))
    others = ("arithmetic", "arithmetic-chains:train:1", "arithmetic/chain", ":train:1", "")
    assert not any(map(arithmetic.is_built_in, others))


@pytest.mark.parametrize(
    "source",
    [
        *("arithmetic:", "arithmetic:train", "arithmetic:train:"),
        *(f"arithmetic:train:{num}" for num in ("0", "-1", "1000000", "9" * 22, "\u0661\u0660")),
        *("arithmetic:train:10:x", "arithmetic:train:10:1:2", "arithmetic:test:10"),
        *("arithmetic-chain:train:0", "arithmetic-chain:test:10", "arithmetic-long:train:10"),
    ],
)
def test_malformed_source_is_rejected(source: str) -> None:
    with pytest.raises(DataError, match="arithmetic"):
        arithmetic.from_source(source)
