"""Overlap of training and held-out problems: missed copies, and false positives."""

import logging

import pytest

from megadapo.data.arithmetic import generate
from megadapo.data.overlap import (
    LINE,
    MIN_CONTAINED,
    normalised,
    overlapping,
    warn_of_overlap,
    without_overlap,
    without_template,
)
from megadapo.data.prompts import Prompt


def prompts(*texts: str, system: str | None = None) -> list[Prompt]:
    before = () if system is None else (("system", system),)
    return [Prompt(text, (*before, ("user", text)), "1", "test") for text in texts]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is $2+2$?", "what is  2 + 2"),
        ("Find \\frac{1}{2}.", "Find \\frac {1} {2}"),
        ("\uff11\uff12+3=?", "12+3=?"),
        ("Let x_1 be 3.5.", "Let x_1 be 3.5"),
    ],
)
def test_copies_with_other_formatting_are_found(one: str, other: str) -> None:
    assert normalised(one) == normalised(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 2+2?", "What is 2-2?"),
        ("What is 3.5?", "What is 35?"),
        ("a < b", "a > b"),
        ("12+34+56=?", "12+34+65=?"),
        ("求 1 的和", "求 2 的和"),
    ],
)
def test_different_problems_are_not_copies(one: str, other: str) -> None:
    assert normalised(one) != normalised(other)


def test_warning_lists_the_overlap(caplog: pytest.LogCaptureFixture) -> None:
    training = prompts("A: 1?", "B: 2?", "C: 3?", "D: 4?", "E: 5?", system="Be brief.")
    held_out = prompts("z: 9", "b: 2", "C: 3?", "D:4", "E:5.")
    assert overlapping(training, held_out) == held_out[1:]
    with caplog.at_level(logging.WARNING):
        warn_of_overlap(training, held_out)
    [record] = caplog.records
    assert "4 of 5 held-out problems" in record.message
    assert "'b: 2'" in record.message and "and 1 more" in record.message
    caplog.clear()
    warn_of_overlap(training, held_out[:1])
    assert not caplog.records


def test_training_prompts_that_are_held_out_are_dropped() -> None:
    """Problems with one text and several hidden states are different problems, and stay."""
    states = [
        Prompt(f"{n}", (("user", "Guess."),), "1", "games", {"secret": n, "index": n})
        for n in range(2)
    ]
    training = [*prompts("1 + 2 =", "3 + 4 =", "1  + 2 =?", "5 + 6 ="), *states]
    assert without_overlap(training, [*prompts("1 + 2 =", "7 + 8 ="), states[0]]) == [
        *prompts("3 + 4 ="),
        *prompts("5 + 6 ="),
        *states,
    ]
    assert without_overlap(training, []) == training


def test_items_of_reasoning_gym_have_no_hidden_state() -> None:
    """Two of its tasks that draw one question looked like two problems, and both stayed."""
    training = [
        Prompt(name, (("user", "3 + 4 ="),), "7", "reasoning-gym", {"config": name})
        for name in ("small", "large")
    ]
    assert {prompt.state for prompt in training} == {""}
    assert without_overlap(training[:1], prompts("3 + 4 =")) == []


DICE = "Two fair dice are thrown. What is the probability of a sum of seven?"
CARDS = "Three cards are drawn from a deck. What is the chance of three hearts?"
CHESS = "In how many ways can eight rooks stand on a board so that none attacks another?"
DAPO = "Solve the following math problem step by step.\n\n{}\n\nRemember to write Answer: first."


@pytest.mark.parametrize(
    ("template", "other"),
    [
        (DAPO, "{}"),
        (DAPO, "Question: {} Think, and put the result within \\boxed{{}}."),
        ("Question: {}", "Problem: {}\nReason step by step."),
        ("{}", "{} Give a fraction."),
    ],
)
def test_copy_in_another_template_is_found(template: str, other: str) -> None:
    """Held-out sets often have their own template."""
    one = prompts(*(template.format(text) for text in (DICE, CARDS)))
    two = prompts(*(other.format(text) for text in (CHESS, DICE, DICE)))
    assert overlapping(one, two) == two[1:]
    assert overlapping(two, one) == one[:1]


def test_every_piece_of_a_problem_is_searched() -> None:
    """Catches a skipped last piece: at some place only it is in the other problem."""
    short = "seven hundred and 12 owls fly"
    assert len(normalised(short)) == MIN_CONTAINED
    for length in range(MIN_CONTAINED):
        long = prompts("z" * length + short, CHESS)
        assert overlapping(long, prompts(short)) == prompts(short)
        assert overlapping(prompts(short), long) == long[:1]


def test_short_problems_and_shared_templates_are_not_copies() -> None:
    """Without their template they may be the same two numbers."""
    sums = prompts("Find the sum of 3 and 5", "Find the sum of 4 and 7")
    products = prompts("Find the product of 3 and 5", "Find the product of 9 and 9")
    assert overlapping(sums, products) == []
    assert overlapping(prompts(*map(DAPO.format, (DICE, CARDS))), prompts(DAPO.format(CHESS))) == []


def test_without_template() -> None:
    texts = ["Solve:\na b\n c\nEnd.", "Solve:\nb\nEnd.", "Solve:\nb\nEnd."]
    assert without_template(texts) == ["a b\n c", "b", "b"]
    assert without_template(texts, LINE) == ["a b\n c", "b", "b"]
    assert without_template(texts, min_texts=3) == texts
    assert without_template(texts[:1]) == texts[:1]
    assert without_template(["a", "a b", ""]) == ["a", "a b", ""]
    assert without_template(["x a y", "x y"]) == ["a y", "y"]


@pytest.mark.parametrize("task", ["arithmetic", "arithmetic-chain"])
def test_built_in_splits_do_not_overlap(task: str) -> None:
    """Normalisation must keep the signs and digits that tell them apart."""
    train, held_out = (
        prompts(*(problem.text for problem in generate(split, 2000, 0, task=task)))
        for split in ("train", "held_out")
    )
    assert overlapping(train, held_out) == []
