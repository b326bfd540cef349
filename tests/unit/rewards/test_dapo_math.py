"""DAPO's string rules against recorded verdicts of the reference scorer.

dapo_math_corpus.json holds what verl's utils/reward_score/math_dapo.py said about each response:
"answer" and "boxed" at commit 00a10a8ef (the rule of the published run, and its strict_box_verify
option), "answer_or_boxed" at commit bf48903d9. Each is [correct, answer]; an absent boxed answer,
None there, is written "[INVALID]".
"""

import json
import time
from pathlib import Path

import pytest

from megadapo.data.group import Score
from megadapo.errors import DataError
from megadapo.rewards.dapo_math import (
    ANSWER_WINDOW,
    MAX_GROUND_TRUTH,
    Rule,
    extract_answer,
    normalize,
    score,
)
from megadapo.rewards.rules import validate_ground_truth

RULES: tuple[Rule, ...] = ("answer", "boxed", "answer_or_boxed")
CORPUS = json.loads(Path(__file__).with_name("dapo_math_corpus.json").read_text())


def response_of(case: dict) -> str:
    """Responses of a million characters are stored as a unit and how often it is repeated."""
    stored = case["response"]
    if isinstance(stored, str):
        return stored
    return stored["before"] + stored["repeat"] * stored["times"] + stored["after"]


@pytest.mark.parametrize("rule", RULES)
def test_scores_equal_the_dapo_scorers(rule: Rule) -> None:
    """A different verdict on any string makes rewards incomparable with published DAPO runs."""
    wrong = []
    for case in CORPUS:
        correct, answer = case[rule]
        found = score(response_of(case), case["ground_truth"], rule)
        if found != Score(1.0 if correct else -1.0, correct, answer):
            wrong.append((case, found))
    assert not wrong


def test_scoring_time_is_bounded() -> None:
    """A response the policy learns to write must not hold a step up."""
    for case in CORPUS:
        response = response_of(case)
        started = time.process_time()
        for rule in RULES:
            score(response, case["ground_truth"], rule)
        assert time.process_time() - started < 0.5, case["kind"]


@pytest.mark.parametrize("unit", ["\\text{", "\\boxed{", "\\overline{", "$", "frac", "a", "=", "{"])
def test_gold_check_time_is_bounded(unit: str) -> None:
    gold = (unit * MAX_GROUND_TRUTH)[:MAX_GROUND_TRUTH]
    started = time.process_time()
    score("Answer: 42", gold)
    assert time.process_time() - started < 1.0


def test_overlong_gold_is_an_error() -> None:
    with pytest.raises(DataError, match="4097 characters"):
        score("Answer: 42", "4" * (MAX_GROUND_TRUTH + 1))


@pytest.mark.parametrize("rule", RULES)
def test_only_response_end_counts(rule: Rule) -> None:
    for case in CORPUS:
        end = response_of(case)[-ANSWER_WINDOW:]
        padded = "Answer: 7 \\boxed{7}\n" + "x" * 1000 + end
        if len(end) == ANSWER_WINDOW:
            gold = case["ground_truth"]
            assert score(padded, gold, rule) == score(end, gold, rule)


@pytest.mark.parametrize(
    ("response", "answer", "boxed"),
    [
        ("Answer: 42.", "42.", None),
        ("**Answer:** 42", "** 42", None),
        ("Answer: 7\nAnswer: $x = 42$", "$x = 42$", None),
        ("so \\boxed{\\frac{1}{2}} it is", None, "\\frac{1}{2}"),
        ("\\boxed{7}\nAnswer: 42", "42", "7"),
        ("Answer: 42" + "x" * 300, None, None),
        ("\\boxed{42}" + "x" * 100, None, None),
        ("\\boxed{42", None, None),
        ("", None, None),
    ],
)
def test_answer_is_extracted_verbatim(response: str, answer: str | None, boxed: str | None) -> None:
    """A comparison of the text at another place than the rule's would reward that place."""
    assert extract_answer(response, "answer") == answer
    assert extract_answer(response, "boxed") == boxed
    assert extract_answer(response, "answer_or_boxed") == (answer or boxed)


@pytest.mark.parametrize(
    "gold", ["42", "-7", "0", "1,000", "\\frac{1}{2}", "0.5", "1/2", "(1, 2)", "x^2+1", "42\n", "π"]
)
def test_valid_gold_is_returned_unchanged(gold: str) -> None:
    assert validate_ground_truth(gold) == gold


@pytest.mark.parametrize(
    ("gold", "why"),
    [
        (None, "not a string but NoneType"),
        (42, "not a string but int 42"),
        (["42"], "not a string but list"),
        ("", "empty"),
        (" \n", "empty"),
        ("units", "it is empty after"),
        ("$$", "it is empty after"),
        ("x=", "it is empty after"),
        ("[INVALID]", "it is empty after"),
        ("4\n2", "would be marked wrong"),
        ("7" * 300, "would be marked wrong"),
        ("7" * 301, "301 characters"),
        ("4\x002", "control characters"),
        ("\ud8002", "not valid Unicode"),
    ],
)
def test_invalid_gold_is_refused_with_reason(gold: object, why: str) -> None:
    with pytest.raises(DataError, match=why):
        validate_ground_truth(gold)


def test_golds_are_checked_under_their_rule() -> None:
    # Normalisation removes the word, the boxed rule compares it.
    assert validate_ground_truth("units", "boxed") == "units"
    assert validate_ground_truth("}{", "answer") == "}{"
    with pytest.raises(DataError, match="under rule 'boxed'"):
        validate_ground_truth("}{", "boxed")
    assert validate_ground_truth("7" * 150, "answer_or_boxed") == "7" * 150
    with pytest.raises(DataError, match="would be marked wrong"):
        validate_ground_truth("7" * 150, "boxed")


def test_valid_corpus_golds_match_their_own_answer_line() -> None:
    num_checked = 0
    for gold in {case["ground_truth"] for case in CORPUS}:
        try:
            validate_ground_truth(gold)
        except DataError:
            continue
        num_checked += 1
        assert score(f"Some work.\nAnswer: {gold}", gold).correct
        assert normalize(gold)
    assert num_checked > 100
