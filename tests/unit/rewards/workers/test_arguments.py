"""Parameters of reward functions as verl's, TRL's and own ones have them, and wrong ones."""

# ruff: noqa: ARG001, ARG005, E731, F811

import functools
from typing import Any

import pytest

from megadapo.rewards.workers.arguments import Arguments
from megadapo.rewards.workers.worker import CannotStart

CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1=?"}]
ROW = {
    "messages": CHAT,
    "is_text": False,
    "ground_truth": "2",
    "data_source": "sums",
    "extra_info": {"index": 7},
    "further": {"level": 3, "answer": "#### 2"},
}
TEXT_ROW = {**ROW, "is_text": True}
A, B = ("a", [1, 2]), ("b", [3])


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def called(function: Any, row: dict = TEXT_ROW, **options: object) -> list:
    """Return what the function makes of the responses A and B."""
    calls = Arguments.of(function, options).calls(row, [A, B])
    return [function(*given, **named) for given, named in calls]


def own(messages, response, tokens, ground_truth, extra_info):
    return messages, response, tokens, ground_truth, extra_info["index"]


def own_batched(messages, responses, tokens, ground_truths, extra_infos):
    return len(messages), responses, tokens, ground_truths, [one["index"] for one in extra_infos]


def verl(data_source, solution_str, ground_truth, extra_info=None):
    return data_source, solution_str, ground_truth, extra_info["index"]


def verl_rule(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    return solution_str, ground_truth, method, format_score, score


def verl_rest(data_source, solution_str, **kwargs):
    return sorted(kwargs)


def verl_batched(data_sources, solution_strs, ground_truths, extra_infos):
    return data_sources, solution_strs, ground_truths, [one["index"] for one in extra_infos]


def trl(prompts, completions, **kwargs):
    return prompts, completions, sorted(kwargs), kwargs["answer"]


def trl_column(completions, answer, missing=None, **kwargs):
    return completions, answer, missing, kwargs["level"]


def trl_tokens(completion_ids, **kwargs):
    return completion_ids, kwargs["completions"]


def other_order(ground_truth, level, response, *, option, _tokens):
    return ground_truth, level, response, option, _tokens


def by_position(messages, completion, tokens, /):
    return completion, tokens


def any_arguments(*arguments):
    return len(arguments), arguments[1]


class Scorer:
    def __call__(self, solution_str, ground_truth):
        return solution_str, ground_truth


@pytest.mark.parametrize(
    ("function", "options", "expected"),
    [
        (own, {}, [(CHAT, "a", [1, 2], "2", 7), (CHAT, "b", [3], "2", 7)]),
        (own_batched, {}, [(2, ["a", "b"], [[1, 2], [3]], ["2", "2"], [7, 7])]),
        (verl, {}, [("sums", "a", "2", 7), ("sums", "b", "2", 7)]),
        (
            verl_rule,
            {"method": "flexible"},
            [("a", "2", "flexible", 0.0, 1.0), ("b", "2", "flexible", 0.0, 1.0)],
        ),
        (verl_rest, {"k": 1}, [["answer", "extra_info", "ground_truth", "k", "level"]] * 2),
        (verl_batched, {}, [(["sums"] * 2, ["a", "b"], ["2", "2"], [7, 7])]),
        (
            trl,
            {},
            [
                (
                    ["1+1=?"] * 2,
                    ["a", "b"],
                    ["answer", "completion_ids", "data_source", "extra_info"]
                    + ["ground_truth", "level"],
                    ["#### 2"] * 2,
                )
            ],
        ),
        (trl_column, {}, [(["a", "b"], ["#### 2"] * 2, None, [3, 3])]),
        (trl_tokens, {}, [([[1, 2], [3]], ["a", "b"])]),
        (other_order, {"option": 5}, [("2", 3, "a", 5, [1, 2]), ("2", 3, "b", 5, [3])]),
        (functools.partial(verl_rule, method="m"), {}, [("a", "2", "m", 0.0, 1.0)] * 1),
        (by_position, {}, [("a", [1, 2]), ("b", [3])]),
        (any_arguments, {}, [(5, "a"), (5, "b")]),
        (Scorer(), {}, [("a", "2"), ("b", "2")]),
        (lambda response: response, {}, ["a", "b"]),
    ],
)
def test_arguments_are_matched_by_name(function, options: dict, expected: list) -> None:
    """A function in another trainer's order would be paid for garbage, without an error."""
    assert called(function, **options)[: len(expected)] == expected


def test_chats_of_a_chat_prompt_are_lists_of_messages() -> None:
    """TRL gives them so; solution_str and response are texts always."""
    prompts, completions, *_ = called(trl, ROW)[0]
    assert (prompts, completions) == ([CHAT] * 2, [said("a"), said("b")])
    assert called(lambda prompt, completion: (prompt, completion), ROW)[0] == (CHAT, said("a"))
    assert called(verl, ROW)[0][1] == "a"


def test_calls_share_nothing_that_a_function_could_change() -> None:
    def changes(response, extra_info, level):
        extra_info["index"] += 1
        return extra_info["index"]

    assert called(changes) == [8, 8]
    assert called(lambda responses, extra_infos: extra_infos[0] is extra_infos[1]) == [False]


def test_required_columns_are_told() -> None:
    arguments = Arguments.of(trl_column, {})
    assert (arguments.columns, arguments.takes_rest) == ({"answer": True, "missing": False}, True)
    arguments = Arguments.of(verl_rule, {"score": 2.0})
    assert arguments.columns == {"method": False, "format_score": False}


def generator(responses):
    yield 1.0


async def async_generator(responses):
    yield 1.0


def hidden(*args, **kwargs):
    return 0.0


def foreign_order(solution_str, ground_truth, /):
    return 0.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda text: 1.0, r"\(text\): it does not take the response by a known name"),
        (lambda ground_truth, extra_info: 1.0, "it does not take the response"),
        (lambda **kwargs: 1.0, "it does not take the response"),
        (hidden, "it does not take the response"),
        (lambda response, solution_str: 1.0, "response and solution_str are two names for one"),
        (lambda prompt, response, messages=None: 1.0, "prompt and messages are two names"),
        (lambda completion_ids, tokens: 1.0, "completion_ids and tokens are two names"),
        (lambda ground_truth, ground_truths, responses: 1.0, "two names for one thing"),
        (lambda prompts, response: 1.0, "response is of one response, and prompts are lists"),
        (lambda solution_str, ground_truths: 1.0, "solution_str is of one response"),
        (lambda completion, extra_infos: 1.0, "completion is of one response"),
        (foreign_order, "arguments before / are passed by position"),
        (Scorer, "it is a class"),
        (generator, "it is a generator"),
        (async_generator, "it is a generator"),
        (functools.partial(verl_rule, "x"), "it does not take the response"),
    ],
)
def test_what_cannot_be_matched_is_refused(function, message: str) -> None:
    with pytest.raises(CannotStart, match=message) as raised:
        Arguments.of(function, {})
    text = str(raised.value)
    assert "it is" in text or "given by name: messages or prompt; response, completion" in text


def test_unknown_option_is_refused() -> None:
    with pytest.raises(CannotStart, match="it does not take the option methd"):
        Arguments.of(verl_rule, {"methd": "strict"})
