"""Scores of steps: ends in text and tokens, allowed results of functions, and worked sums."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megadapo.data import arithmetic
from megadapo.data.prompts import Prompt
from megadapo.observe.rollouts.token_pieces import Decode, decoder_of
from megadapo.rewards.builtin import arithmetic_steps_reward
from megadapo.rewards.config import RewardConfig, RewardFunction
from megadapo.rewards.function_runners import Runner, start_runner
from megadapo.rewards.scorer import Scorer
from megadapo.rewards.steps import split_steps, step_ends

MODULE = "tests.support.rollout.reward_functions"
PROMPT = Prompt("id", (("user", "12+34+56=?"),), "102", "arithmetic", {})
WORKED = "12+34=46;46+56=102\nAnswer: 102"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained("configs/quickstart-base")


@pytest.fixture(scope="module")
def decode(tokenizer: PreTrainedTokenizerBase) -> Decode:
    return decoder_of(tokenizer)


@pytest.fixture(scope="module")
def worked_tokens(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    return np.array([*tokenizer.encode(WORKED), tokenizer.eos_token_id], dtype=np.int32)


@pytest.fixture(scope="module")
def returns_steps() -> Iterator[Runner]:
    config = RewardFunction(
        function=f"{MODULE}:steps", step_score="sum", on_failure="score", failure_score=-0.5
    )
    runner = start_runner(config)
    yield runner
    runner.close()


def characters(token_ids: list[int]) -> str:
    """Decode tokens that are characters; 0 is a special token."""
    return "".join(chr(token) for token in token_ids if token)


def ids(text: str, end: int = 0) -> np.ndarray:
    return np.array([*map(ord, text), end], dtype=np.int32)


@pytest.mark.parametrize(
    ("text", "separators", "expected"),
    [
        ("a;b\nc", (";", "\n"), ["a;", "b\n", "c"]),
        ("a;;b", (";",), ["a;", ";b"]),
        (" ;a; \n", (";", "\n"), [" ;a; \n"]),
        ("a\n\n\nb", ("\n", "\n\n"), ["a\n\n", "\nb"]),
        ("a. b", (".",), ["a.", " b"]),
        ("abc", ("|",), ["abc"]),
        ("abc", (), ["abc"]),
        ("", (";",), [""]),
        (";;", (";",), [";;"]),
    ],
)
def test_steps_end_with_separators_and_join_to_the_text(text, separators, expected) -> None:
    assert split_steps(text, separators) == expected
    assert "".join(expected) == text


def test_last_step_has_end_of_sequence_token() -> None:
    assert step_ends("ab;c", ids("ab;c"), (";",), characters) == [3, 5]
    assert step_ends("", ids(""), (";",), characters) == [1]
    assert step_ends("", np.empty(0, dtype=np.int32), (";",), characters) == [0]


def test_token_across_steps_belongs_to_the_one_ending_in_it() -> None:
    """So does a token that ends two steps, or starts a character that a later token ends."""
    words = {1: "a;b", 2: ";c", 3: ";d;e;", 4: "", 5: "f"}

    def join(token_ids: list[int]) -> str:
        return "".join(words[token] for token in token_ids)

    tokens = np.array([1, 2, 4, 3, 5], dtype=np.int32)
    assert split_steps("a;b;c;d;e;f", (";",)) == ["a;", "b;", "c;", "d;", "e;", "f"]
    assert step_ends("a;b;c;d;e;f", tokens, (";",), join) == [1, 2, 4, 4, 4, 5]


def test_tokens_of_different_text_are_refused() -> None:
    assert step_ends("other", ids("ab;c"), (";",), characters) is None


def test_bytes_of_a_real_tokenizer(tokenizer: PreTrainedTokenizerBase, decode: Decode) -> None:
    text = "\u00fc;\u20ac\nx"
    tokens = np.array(tokenizer.encode(text), dtype=np.int32)
    assert step_ends(text, tokens, (";", "\n"), decode) == [3, 7, 8]


def test_spans_become_ends_and_combined_score(returns_steps: Runner) -> None:
    (one,) = returns_steps.score_group(PROMPT, ["fine"], [ids("fine")[:4]])
    assert (one.reward, one.correct, one.failure) == (1.5, None, None)
    assert one.steps == ((2, 1.0), (4, 0.5))
    assert dict(one.parts) == {"steps": 2.0, "step_mean": 0.75, "failed": 0.0}


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("string", "returned str as steps, not a list"),
        ("none", "returned no steps"),
        ("too few", "returned steps without spans, and reward.functions.step_separators is empty"),
        ("nan", "step_separators is empty"),
        ("mixed", "returned a float as a step that is no (start, stop, score)"),
        ("pair", "returned a tuple as a step that is no (start, stop, score)"),
        ("float", "returned a tuple as a step that is no (start, stop, score)"),
        ("empty", "returned a step of tokens 1 to 1 after token 0 of 4"),
        ("behind", "returned a step of tokens 4 to 99 after token 4 of 4"),
        ("before", "returned a step of tokens -1 to 2"),
        ("overlap", "returned a step of tokens 2 to 4 after token 3"),
        ("order", "returned a step of tokens 0 to 2 after token 4"),
        ("nan span", "returned nan as a step"),
        ("huge", "returned inf as the score of its steps"),
        ("grow", "returned a step of tokens 0 to 14 after token 0 of 4"),
    ],
)
def test_wrong_steps_are_failures(returns_steps: Runner, response: str, reason: str) -> None:
    (failed,) = returns_steps.score_group(PROMPT, [response], [np.arange(4, dtype=np.int32)])
    assert (failed.reward, failed.correct, failed.steps) == (-0.5, None, ())
    assert reason in returns_steps.drain_warning()


@pytest.mark.parametrize(
    ("step_score", "expected"),
    [("min", 1.0), ("mean", 2.0), ("last", 3.0), ("product", 6.0), ("sum", 6.0)],
)
def test_one_score_of_steps(step_score: str, expected: float) -> None:
    """A batched function scores lines; a text that splits differently is a failure."""
    config = RewardFunction(
        function=f"{MODULE}:each_step", step_separators=["\n"], step_score=step_score
    )
    runner = start_runner(config, characters)
    texts = ["a\na b\na b c", "a\n\nb"]
    fine, failed = runner.score_group(PROMPT, texts, [ids(text) for text in texts])
    runner.close()
    assert (fine.reward, fine.steps) == (expected, ((2, 1.0), (6, 2.0), (12, 3.0)))
    assert "returned scores of 3 steps; by reward.functions.step_separators there are 2" in str(
        failed.failure
    )


def test_whole_response_scores_are_added_to_last_step(
    decode: Decode, worked_tokens: np.ndarray
) -> None:
    functions = (
        {"function": "arithmetic_steps", "weight": 2.0},
        "rule",
        {"function": f"{MODULE}:steps", "weight": 10.0},
    )
    with Scorer(RewardConfig(functions=functions, symbolic="off"), decode) as scorer:
        (one,) = scorer.score_group(PROMPT, [WORKED], [worked_tokens])
    assert one.correct
    assert one.reward == 2.0 * 1.0 + 1.0 + 10.0 * 0.5
    assert one.steps == ((2, 10.0), (4, 5.0), (9, 2.0), (19, 2.0), (26, 2.0 + 1.0))
    assert dict(one.parts)["arithmetic_steps/steps"] == 3.0


def test_functions_without_steps_give_none() -> None:
    functions = ("rule", {"function": f"{MODULE}:scaled", "options": {"factor": 2}})
    with Scorer(RewardConfig(functions=functions, symbolic="off")) as scorer:
        (one,) = scorer.score_group(PROMPT, ["Answer: 102"], [ids("Answer: 102")])
    assert one.steps == ()


def check(response: str, prompt: str = "12+34+56=?", gold: str = "102") -> list[float]:
    messages = [{"role": "user", "content": prompt}]
    return arithmetic_steps_reward(messages, response, gold)["steps"]


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (WORKED, [1, 1, 1]),
        ("12+34=47;47+56=103\nAnswer: 103", [0, 1, 0]),
        ("12+34=46;46+57=103\nAnswer: 103", [1, 0, 0]),
        ("12+34=46;47+56=103\nAnswer: 103", [1, 0, 0]),
        ("Answer: 102", [1]),
        ("Answer: 101", [0]),
        ("12+34=46;46+56=102;102+0=102\nAnswer: 102", [1, 1, 0, 1]),
        ("Answer: 102\nAnswer: 102", [1, 0]),
        ("Answer: 102\n12+34=46", [1, 0]),
        ("let me see;12+34=46", [0, 1]),
        ("0012+34=0046;", [1]),
        ("", [0]),
        ("1" * 5000 + "+1=2", [0]),
    ],
)
def test_each_step_of_a_sum_is_checked(response: str, expected: list[float]) -> None:
    """A slip costs only its own step; repeated or extra steps earn nothing."""
    assert check(response) == expected


@pytest.mark.parametrize("task", ["arithmetic", "arithmetic-chain"])
def test_worked_answers_are_right_except_for_their_slip(task: str) -> None:
    rng = random.Random(0)
    for problem in arithmetic.generate("train", 50, 0, task=task):
        gold, num_sums = str(problem.answer), len(problem.terms) - 1
        right = arithmetic.worked_answer(problem, rng, kind="steps")
        assert check(right, problem.text, gold) == [1.0] * (num_sums + 1)
        wrong = arithmetic.worked_answer(problem, rng, kind="steps", wrong=True)
        *sums, answer = check(wrong, problem.text, gold)
        assert (len(sums), sum(sums), answer) == (num_sums, num_sums - 1, 0.0)
        direct = arithmetic.worked_answer(problem, rng, kind="direct")
        assert check(direct, problem.text, gold) == [1.0]
