"""The built-in task: the learning curve of the quickstart rests on these properties."""

from __future__ import annotations

import random

import pyarrow.parquet as pq
import pytest

from megadapo.data import arithmetic
from megadapo.data.arithmetic import Problem, generate, worked_answer
from megadapo.errors import DataError
from megadapo.rewards.dapo_math import score

RECORDED_TRAIN = ["81+99+34=?", "53+44+60=?", "82+51+15=?"]
RECORDED_HELD_OUT = ["88+95+50=?", "31+93+61=?", "77+99+38=?"]


def test_no_held_out_sum_can_be_drawn_for_training_even_with_its_terms_reordered() -> None:
    train = {tuple(sorted((p.a, p.b, p.c))) for p in generate("train", 8192, seed=0)}
    held_out = {tuple(sorted((p.a, p.b, p.c))) for p in generate("held_out", 2048, seed=1)}
    assert len(train) > 7000 and len(held_out) > 1500
    assert not train & held_out


def test_the_held_out_share_of_all_sums_is_one_in_ten() -> None:
    # A split that is (nearly) empty or (nearly) everything would still be disjoint.
    sums = [Problem(a, b, c) for a in range(10, 40) for b in range(a, 40) for c in range(b, 40)]
    share = sum(problem.split == "held_out" for problem in sums) / len(sums)
    assert share == pytest.approx(0.1, abs=0.02)


def test_problems_depend_on_the_seed_alone_and_do_not_repeat() -> None:
    problems = generate("train", 1000, seed=7)
    assert problems == generate("train", 1000, seed=7)
    assert problems[:100] == generate("train", 100, seed=7)
    assert problems[:100] != generate("train", 100, seed=8)
    assert len(set(problems)) == 1000
    assert all(10 <= term <= 99 for p in problems for term in (p.a, p.b, p.c))


def test_problems_are_the_same_on_every_machine_and_python() -> None:
    # Recorded: a changed generator would silently make runs and results incomparable.
    assert [p.text for p in generate("train", 3, seed=0)] == RECORDED_TRAIN
    assert [p.text for p in generate("held_out", 3, seed=0)] == RECORDED_HELD_OUT


@pytest.mark.parametrize("kind", ["direct", "steps"])
def test_right_answers_score_and_wrong_ones_do_not(kind: arithmetic.Kind) -> None:
    rng = random.Random(0)
    for problem in generate("train", 300, seed=0):
        gold = problem.row()["reward_model"]["ground_truth"]
        assert score(worked_answer(problem, rng, kind=kind), gold).correct
        wrong = score(worked_answer(problem, rng, kind=kind, wrong=True), gold)
        assert not wrong.correct and wrong.answer.isdecimal()


def test_steps_show_two_sums_and_a_slip_is_carried_through() -> None:
    rng = random.Random(1)
    num_true_sums = []
    for problem in generate("train", 200, seed=3):
        for wrong in (False, True):
            work, answer = worked_answer(problem, rng, kind="steps", wrong=wrong).split("\n")
            sums = [part.split("=") for part in work.split(";")]
            holds = [sum(map(int, left.split("+"))) == int(right) for left, right in sums]
            assert answer == f"Answer: {sums[1][1]}"
            assert sums[1][0].startswith(f"{sums[0][1]}+"), "the second sum starts from the first"
            assert all(holds) is not wrong
            num_true_sums.append(sum(holds))
    assert set(num_true_sums) == {1, 2}


def test_a_direct_answer_is_shorter_than_a_worked_one() -> None:
    problem, rng = Problem(12, 34, 56), random.Random(0)
    assert worked_answer(problem, rng, kind="direct") == "Answer: 102"
    assert worked_answer(problem, rng, kind="steps") == "12+34=46;46+56=102\nAnswer: 102"


def test_the_export_has_the_columns_of_dapo_math_17k(tmp_path) -> None:
    problems = generate("held_out", 5, seed=0)
    arithmetic.write_parquet(tmp_path / "sums.parquet", problems)
    rows = pq.read_table(tmp_path / "sums.parquet").to_pylist()
    assert rows == [problem.row() for problem in problems]
    assert rows[0]["prompt"] == [{"role": "user", "content": problems[0].text}]
    assert rows[0]["reward_model"]["ground_truth"] == str(problems[0].answer)
    assert rows[0]["extra_info"]["index"] == problems[0].text.removesuffix("=?")


def test_a_source_names_split_number_and_seed() -> None:
    assert arithmetic.from_source("arithmetic:train:20") == generate("train", 20, seed=0)
    assert arithmetic.from_source("arithmetic:held_out:20:5") == generate("held_out", 20, seed=5)


@pytest.mark.parametrize(
    "source",
    [
        "arithmetic:",
        "arithmetic:train",
        "arithmetic:train:",
        "arithmetic:train:0",
        "arithmetic:train:-1",
        "arithmetic:train:1000000",
        "arithmetic:train:9999999999999999999999",
        "arithmetic:test:10",
        "arithmetic:train:10:x",
        "arithmetic:train:10:1:2",
        "arithmetic:train:\u0661\u0660",
    ],
)
def test_a_source_that_names_no_task_is_refused(source: str) -> None:
    with pytest.raises(DataError, match="arithmetic"):
        arithmetic.from_source(source)
