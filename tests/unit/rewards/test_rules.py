"""The rules besides DAPO's: an answer at the wrong place, or a response that takes long."""

import time

import pytest

from megadapo.data.group import NO_ANSWER
from megadapo.data.patterns import last_match
from megadapo.data.prompts import Prompt
from megadapo.errors import ConfigError, DataError
from megadapo.rewards.config import RewardConfig
from megadapo.rewards.rules import as_number, marked_answer, score, validate_ground_truth
from megadapo.rewards.scorer import Scorer


@pytest.mark.parametrize(
    ("response", "gold"),
    [
        *[("It is 1,000.", "1000"), ("10-7=3", "3"), ("is -3.50", "-3.5"), ("\u22124", "-4")],
        *[("(2)-3", "3"), ("$12.00$", "12"), ("half: .5", "0.50"), ("f(1,2", "2"), ("-0", "0")],
        *[("0012", "12"), ("v1.2.3", "3"), ("12.", "12"), ("3 or 4", "4"), ("9" * 400, "9" * 400)],
        *[("a loss of -$5.", "-5"), ("-\\$1,000", "-1000"), ("\u2212£.50", "-0.5"), ("$-5", "-5")],
        *[("9-$5", "5"), ("(9)-$5", "5"), ("-$x 5", "5"), ("$12.00-$5.00$", "5"), ("-$5$", "-5")],
        *[("x = - 5", "-5"), ("$- 5$", "-5"), ("\\boxed{- 5}", "-5"), ("x=\u20135", "-5")],
        *[("- 5", "-5"), ("= - $5", "-5"), ("9 - 5", "5"), ("$x$ - 5", "5"), ("3\u20135", "5")],
        *[("1{,}000", "1000"), ("1\\,000\\,000", "1000000"), ("3{,}14", "14"), ("x\n- 5", "5")],
    ],
)
def test_last_number_is_compared_as_a_number(response, gold):
    assert score(response, gold, "last_number").correct
    assert not score(response + " 77", gold, "last_number").correct


def test_no_number_is_no_answer():
    found = score("many", "7", "last_number")
    assert (found.reward, found.correct, found.answer) == (-1.0, False, "[INVALID]")
    assert [as_number(text) for text in ("x", "1 2", "1/2", "", "1,00")] == [None] * 5


@pytest.mark.parametrize(
    ("response", "gold", "correct"),
    [
        *[("No", "No", True), ("So:\n\nYes \n", "Yes", True), ("yes", "Yes", False)],
        *[("Yes\nNo", "Yes", False), ("It is Yes", "Yes", False), (" ", "Yes", False)],
        *[("a\nb\nc", "b\nc", True), ("b\nc\nd", "b\nc", False)],
    ],
)
def test_exact_text_compares_the_last_lines(response, gold, correct):
    assert score(response, gold, "exact_text").correct is correct


@pytest.mark.parametrize(
    ("response", "gold", "answer"),
    [
        ("<answer>\nA 1\n</answer> 2", "B", "A 1"),
        ("<answer>a</answer>, <answer>b</answer>", "", "b"),
        *[("<answer>a\nanswer: b", "B", "b"), ("</answer>a", "B", "</answer>a")],
        ("Answer: a\n**Answer:** *b*\nc", "B", "b"),
        ("Answer:\n1 2\n3 4\n", "1 2\n3 5", "1 2\n3 4"),
        *[("a\nb\nc", "1 2\n3 4", "b\nc"), ("a\nb", "", "b"), (" \n", "", "")],
        *[
            ("It is 7.", "8", "7"),
            ("Answer: 7.\n8", "8", "7"),
            ("<answer>6 or 7</answer>8", "8", "7"),
        ],
        *[("many", "8", ""), ("Answer: many", "8", "many")],
    ],
)
def test_marked_answer_is_found(response, gold, answer):
    assert marked_answer(response, gold) == answer


@pytest.mark.parametrize(
    "text",
    [
        *("1/2", "1 / 2", "x/2", "(1+3)/2", r"\frac{1}{2}", r"\dfrac12", r"\frac{n}{2}", "10^2"),
        *(
            "10 ^ 2",
            "10**2",
            "10 ** 2",
            "x^{2}",
            "1 + 2",
            "1*2",
            "1 * 2",
            r"1 \times 2",
            "1\u00d72",
        ),
        *(r"1 \cdot 2", r"\sqrt{2}", "sqrt(2)", "\u221a2", "1_2", "1_{2}", "x_2", "1e2", "2^n"),
        "2^{n}",
    ],
)
def test_operand_is_no_answer(text):
    """A policy that leaves out the last calculation would be right half of the time."""
    found = score(f"It is {text}", "2", "last_number")
    assert (found.correct, found.answer) == (False, NO_ANSWER)
    assert score(f"It is {text} = 2", "2", "last_number").correct
    assert marked_answer(f"Answer: {text}", "2") == text


@pytest.mark.parametrize(
    "text",
    [
        *(
            "**2**",
            "**Answer:** 2",
            "**The answer is** 2",
            "Step 1\n+ 2",
            "Item 1\n* 2",
            "* 2",
            "+2",
        ),
        *(
            "2/hour",
            "2!",
            "f(2)",
            "Answer_2",
            "3-2",
            "1/3 of 6, so 2",
            r"$\frac{4}{2}$ is 2",
            "# 2",
        ),
    ],
)
def test_number_beside_other_marks_is_an_answer(text):
    assert score(text, "2", "last_number").correct


def test_pattern_takes_the_first_group_in_the_last_line_that_it_matches():
    assert last_match("x", "y") is None
    assert last_match(r"(?:a|the) (\w+) [(](\d)", "the b (1\na c (2 a d (3\n") == "c"
    assert last_match(r"\d+", "12 and 3") == "12"
    assert last_match("é(.)", "é\ud800") == "?"
    pattern = r"#### (.+)"
    right = ["#### 1\n#### 1,000 \nDone.", "#### 1000.0"]
    assert all(score(text, "1000", "pattern", pattern).correct for text in right)
    assert not score("#### 1000\n#### 1", "1000", "pattern", pattern).correct
    assert score("1000", "1000", "pattern", pattern).answer == "[INVALID]"


@pytest.mark.parametrize(
    ("gold", "rule", "said"),
    [
        (None, "exact_text", "not a string but NoneType"),
        *[(" ", rule, "it is empty") for rule in ("last_number", "exact_text", "pattern")],
        ("x + 1", "last_number", "it is no number"),
        ("a\nb", "pattern", "several lines"),
        ("a" * 5000, "exact_text", "more than 4096 characters"),
    ],
)
def test_gold_that_no_response_matches_is_refused(gold, rule, said):
    with pytest.raises(DataError, match=said):
        validate_ground_truth(gold, rule)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"rule": "pattern"}, "reward.pattern is missing"),
        ({"pattern": "x"}, "reward.pattern has no effect"),
        ({"rule": "pattern", "pattern": "(a)\\1"}, "no regular expression of RE2"),
        ({"rule": "pattern", "pattern": "x*"}, "matches an empty line"),
        ({"rule": "last_number", "symbolic": "decide"}, "needs reward.rule to be one of answer"),
    ],
)
def test_settings_without_effect_are_refused(keys, said):
    with pytest.raises(ConfigError, match=said):
        RewardConfig(**keys)


def test_scorer_uses_the_pattern_and_starts_no_symbolic_comparison():
    """The symbolic comparison reads an `Answer:` line, so its counts would be of other answers."""
    with Scorer(RewardConfig(rule="pattern", pattern="= (.+)")) as scorer:
        assert [one.correct for one in scorer.verifier.score_batch(["a = 7", "7"], ["7"] * 2)] == [
            *(True, False)
        ]
        scorer.verifier.ask_cross_check()
        assert scorer.verifier.cross_checks(["a = 7"], "7") == [None]
        assert scorer.drain_warnings() == []


@pytest.mark.parametrize(
    "text", ["a", "1,", "111,", "-", "1.", "-$", "-$1", "a\n", "\n", "Answer ", "<answer>"]
)
def test_time_is_linear_in_the_response(text):
    """Python's own matching of this pattern doubles its time with each further letter."""
    start = time.process_time()
    response = text * (200_000 // len(text)) + "b"
    for rule in ("last_number", "exact_text", "pattern"):
        score(response, "7", rule, r"(a|aa)+(1|1,)+$")
    marked_answer(response, "a")
    assert time.process_time() - start < 5.0


def test_function_without_prompts_is_named_before_a_run(caplog) -> None:
    """Catches a misspelt data_source, whose function would never be called."""
    prompts = [Prompt("id", (("user", "?"),), "2", name) for name in ("maths", "code")]

    def check(*data_sources: str) -> None:
        entry = {"function": "boxed", "data_sources": data_sources}
        with Scorer(RewardConfig(functions=("rule", entry), symbolic="off")) as scorer:
            scorer.check_prompts(prompts)

    with pytest.raises(
        ConfigError, match=r'\[1\] \(boxed\) has no prompts: .* have "maths", "code"'
    ):
        check("math")
    check("maths", "cod")
    assert caplog.messages == [
        'reward.functions[1] (boxed): no prompt has "cod"; prompts have "maths", "code"'
    ]
