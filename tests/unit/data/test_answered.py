"""Answered conversations: their tokens, the rows that are refused, and the rows of rollouts."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from transformers import AutoTokenizer

from megadapo.data.answered import AnswerEncoder, CorrectRows, fingerprint, load_answered
from megadapo.data.config import DataColumns
from megadapo.data.group import NO_VERSION, Group, Response, Score
from megadapo.data.pairs import load_pairs
from megadapo.data.prompts import Prompt, render
from megadapo.errors import DataError
from tests.support.rows import write_jsonl

CHATML = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
"""A template in which each turn ends with the end-of-sequence token, as in Qwen's chat models."""
FORGETTING = "{% for m in messages[-1:] %}{{ m.role[0] + ':' + m.content }}{% endfor %}a:"
"""A template that leaves out the turns before the last one."""
ASK = {"role": "user", "content": "1+2=?"}
SAY = {"role": "assistant", "content": "3"}
AGAIN = {"role": "user", "content": "4+5=?"}
LAST = {"role": "assistant", "content": "9"}


def encoder_of(template=None, **limits):
    tokenizer = AutoTokenizer.from_pretrained("configs/quickstart-base")
    tokenizer.chat_template = template
    limits = {"max_prompt_tokens": 64, "max_response_tokens": 8, **limits}
    return tokenizer, AnswerEncoder(tokenizer, **limits)


def load(tmp_path, *rows, template=None, overlong="error", **limits):
    tokenizer, encoder = encoder_of(template, **limits)
    return tokenizer, load_answered(
        write_jsonl(tmp_path / "rows.jsonl", *rows), encoder, overlong=overlong
    )


def group_of(tokenizer, *responses):
    """A group whose last response is wrong, and whose last but one was cut off."""
    prompt = Prompt("p", (("user", "4+5=?"),), "9", "")
    sampled = tuple(
        Response(
            token_ids=np.array(ids, dtype=np.int32),
            logprobs=np.zeros(len(ids), dtype=np.float32),
            finish_reason="stop" if ids[-1] == tokenizer.eos_token_id else "length",
            text=tokenizer.decode(ids, skip_special_tokens=True),
            policy_versions=np.zeros(len(ids), dtype=np.int32),
        )
        for ids in responses
    )
    scores = [Score(1.0, True, "9")] * (len(sampled) - 1) + [Score(-1.0, False, "8")]
    return Group(
        prompt_index=0,
        prompt=prompt,
        prompt_ids=tuple(render(prompt, tokenizer)),
        responses=sampled,
        scores=tuple(scores),
    )


@pytest.mark.parametrize("template", [None, CHATML])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASK, SAY]},
        {"prompt": [ASK], "response": "3"},
        {"prompt": "1+2=?", "answer": "3"},
    ],
)
def test_tokens_are_those_of_a_rollout(tmp_path, row, template):
    """With other prompt tokens, or without its end, an answer would be off the run's policy."""
    tokenizer, [[(tokens, wanted)]] = load(tmp_path, row, template=template)
    prompt = render(Prompt("", (("user", "1+2=?"),), "", ""), tokenizer)
    answer = [*tokenizer.encode("3"), tokenizer.eos_token_id]
    assert tokens.tolist() == prompt + answer
    assert wanted.tolist() == [False] * len(prompt) + [True] * len(answer)


OTHER_END = CHATML.replace("eos_token", "';'")
"""A template that ends earlier turns with another token than a sampled answer ends with."""


def test_answers_of_a_chat_share_a_sequence_where_the_template_allows(tmp_path):
    row = {"messages": [ASK, SAY, AGAIN, LAST]}
    tokenizer, [[(tokens, wanted)]] = load(tmp_path, row, template=CHATML)
    assert tokenizer.decode(tokens[wanted]).replace(tokenizer.eos_token, "|") == "3|9|"
    both = render(
        Prompt("", (("user", "1+2=?"), ("assistant", "3"), ("user", "4+5=?")), "", ""), tokenizer
    )
    assert tokens.tolist()[: len(both)] == both
    for template, second in ((FORGETTING, "u:4+5=?a:9"), (OTHER_END, "u:1+2=?;a:3;u:4+5=?;a:9")):
        tokenizer, [sequences] = load(tmp_path, row, template=template)
        assert [tokenizer.decode(one[wanted][:-1]) for one, wanted in sequences] == ["3", "9"]
        assert tokenizer.decode(sequences[1][0]).startswith(second)


def learned(tokenizer, rows):
    """Return the texts that each sequence of the rows is trained on."""
    return [tokenizer.decode(one[wanted][:-1]) for row in rows for one, wanted in row]


THINKING = CHATML.replace("'a:'", "'a:<think>\\n'")
"""A template whose generation prompt opens a thought, as those of reasoning models."""


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ("<think>\n1</think>3", "1</think>3"),
        ("<think>1</think>3", "1</think>3"),
        ("\n<think>\n\n1</think>3", "\n1</think>3"),
        ("1</think>3", "1</think>3"),
        ("<think>\n1", "1"),
        ("3", None),
    ],
)
def test_thought_that_the_template_opens_is_in_the_tokens_once(tmp_path, answer, kept, caplog):
    """Otherwise the model learns to open a thought inside a thought, or to answer inside one."""
    row = {"messages": [ASK, {**SAY, "content": answer}]}
    sizes = {"max_response_tokens": 64}
    if kept is None:
        with pytest.raises(DataError, match="line 1: the chat template begins each .* <think>"):
            load(tmp_path, row, template=THINKING, **sizes)
        return
    tokenizer, rows = load(tmp_path, row, template=THINKING, **sizes)
    assert learned(tokenizer, rows) == [kept]
    assert tokenizer.decode(rows[0][0][0]).count("<think>") == 1
    assert ("do not end it" in caplog.text) == ("</think>" not in answer)
    sampled = {**row, "prompt_id": "p"}
    assert learned(*load(tmp_path, sampled, template=THINKING, **sizes)) == [answer]


def test_open_thoughts_are_counted_for_each_file(tmp_path, caplog):
    _, encoder = encoder_of(THINKING, max_response_tokens=64)
    for name, answer, is_open in (("train", "<think>1", True), ("held-out", "1</think>3", False)):
        path = write_jsonl(
            tmp_path / f"{name}.jsonl", {"messages": [ASK, {**SAY, "content": answer}]}
        )
        load_answered(path, encoder)
        assert ("do not end it" in caplog.text) == is_open
        caplog.clear()


def test_answers_that_were_given_are_not_learned(tmp_path):
    """Rows of rollouts have the examples of their prompts, but not the prompts' column."""
    examples = write_jsonl(tmp_path / "few.jsonl", {"question": "1?", "answer": "one"})
    columns = DataColumns(prompt="ask", template="Q: {prompt}\nA:", examples=examples)
    tokenizer, encoder = encoder_of(CHATML, max_prompt_tokens=128)
    given = {**SAY, "weight": 0}
    rows = [
        {"ask": "1+2=?", "response": "3"},
        {"messages": [*SHOT, WRAPPED, SAY], "prompt_id": "p"},
        {"messages": [*SHOT, ASK, given, WRAPPED, LAST], "prompt_id": "p"},
    ]
    found = load_answered(write_jsonl(tmp_path / "a.jsonl", *rows), encoder, columns=columns)
    assert learned(tokenizer, found) == ["3", "3", "9"]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": [ASK]}, "no message of the assistant"),
        ({"messages": [SAY]}, "no message of the assistant"),
        ({"messages": "3"}, "messages is not a list of chat messages"),
        ({"prompt": "1+2=?"}, "expected messages, or prompt with either response or answer"),
        ({"prompt": "1", "response": "3", "answer": "4"}, "expected messages, or prompt"),
        ({"prompt": "1+2=?", "response": 3}, "response is not a string"),
        ({"messages": [ASK, SAY], "response_ids": [1, 2]}, "another tokenizer made them"),
        ({"messages": [ASK, SAY], "response_ids": "3"}, "another tokenizer made them"),
        ({"messages": [ASK, SAY], "tools": "{"}, "tools is not JSON"),
        ({"messages": [ASK, SAY], "tools": ["add"]}, "tools is not a list of JSON schemas"),
        ({"messages": [ASK, {**SAY, "content": None, "tool_calls": [{}]}]}, "has tool_calls"),
        ({"messages": [ASK, {**SAY, "reasoning_content": "1"}]}, "has reasoning_content"),
        ({"messages": [ASK, {**SAY, "weight": 0.5}, AGAIN, LAST]}, "has weight 0.5"),
        ({"messages": [ASK, {**SAY, "weight": 0}]}, "no message .* to learn"),
        ({"messages": [ASK, {**SAY, "content": "3" * 9}]}, "an answer has 10 tokens; at most"),
        ({"messages": [{**ASK, "content": "3" * 99}, SAY]}, "a prompt has 99 tokens; at most"),
    ],
)
def test_bad_row_is_named(tmp_path, row, problem):
    with pytest.raises(DataError, match=problem) as caught:
        load(tmp_path, {"messages": [ASK, SAY]}, row)
    assert "rows.jsonl, line 2" in str(caught.value)


SHOT = ({"role": "user", "content": "Q: 1?\nA:"}, {"role": "assistant", "content": "one"})
WRAPPED = {"role": "user", "content": "Q: 1+2=?\nA:"}
SYSTEM = {"role": "system", "content": "S"}


@pytest.mark.parametrize(
    ("chat", "missing"),
    [
        ([SYSTEM, *SHOT, WRAPPED], []),
        ([*SHOT, WRAPPED], ["system"]),
        ([{**SYSTEM, "content": "T"}, *SHOT, WRAPPED], ["system"]),
        ([SYSTEM, *SHOT, ASK], ["template"]),
        ([SYSTEM, {**ASK, "role": "tool"}], ["template", "examples"]),
        ([SYSTEM, *SHOT[:1], WRAPPED], ["examples"]),
        ([ASK], ["system", "template", "examples"]),
    ],
)
def test_chat_without_the_texts_around_prompts_is_refused(tmp_path, chat, missing):
    """Rollouts would get other prompts than the model was trained on; their own rows pass."""
    examples = write_jsonl(tmp_path / "few.jsonl", {"question": "1?", "answer": "one"})
    columns = DataColumns(system="S", template="Q: {prompt}\nA:", examples=examples)
    answered = write_jsonl(tmp_path / "chats.jsonl", {"messages": [*chat, SAY]})
    pair = {"messages": chat, "chosen": "3", "rejected": "4"}
    pairs = write_jsonl(tmp_path / "pairs.jsonl", pair)
    tokenizer, encoder = encoder_of(CHATML, max_prompt_tokens=128)
    keys = ", ".join(f"data.columns.{one}" for one in missing)
    for load_rows in (
        partial(load_answered, answered, encoder),
        partial(load_pairs, pairs, tokenizer, max_tokens=128),
    ):
        said = f"line 1: chats .* lacks the text of {keys}:"
        with pytest.raises(DataError, match=said) if missing else nullcontext():
            assert len(load_rows(columns=columns)) == 1


def test_long_rows_can_be_dropped(tmp_path):
    long = {"messages": [ASK, {**SAY, "content": "3" * 9}]}
    _, rows = load(tmp_path, long, {"messages": [ASK, LAST]}, overlong="drop")
    assert len(rows) == 1
    with pytest.raises(DataError, match="no usable row"):
        load(tmp_path, long, overlong="drop")


def test_fingerprint_tells_rows_apart(tmp_path):
    one, two = {"messages": [ASK, SAY]}, {"messages": [AGAIN, LAST]}
    found = {
        fingerprint(load(tmp_path, *rows)[1])
        for rows in ([one, two], [two, one], [one], [one, one], [two])
    }
    assert len(found) == 5
    # without the lengths, the bytes of these would be the same
    two_sequences = [[(np.int32([1]), np.array([True])), (np.int32([2]), np.array([True]))]]
    one_sequence = [[(np.int32([1, 2 * 256 + 1]), np.array([False, True]))]]
    assert fingerprint(two_sequences) != fingerprint(one_sequence)


def test_correct_rows_restore_the_sampled_tokens(tmp_path):
    """Tokens that encoding the text does not give must survive the file."""
    tokenizer, encoder = encoder_of()
    end = tokenizer.eos_token_id
    usual = [*tokenizer.encode("9"), end]
    unusual = [*tokenizer.encode("A"), *tokenizer.encode("nswer"), end]
    cut, wrong = tokenizer.encode("123"), [*tokenizer.encode("8"), end]
    group = group_of(tokenizer, usual, usual, unusual, cut, wrong)
    rows = CorrectRows(tmp_path / "correct.jsonl", encoder)
    rows.add([group])
    rows.add([group])
    assert (rows.num_rows, rows.num_repeated, rows.num_truncated) == (2, 4, 2)
    lines = [json.loads(line) for line in rows.path.read_text().splitlines()]
    assert ["response_ids" in line for line in lines] == [False, True]
    assert {line["prompt_id"] for line in lines} == {group.prompt.id}
    found = load_answered(str(rows.path), encoder)
    for [(tokens, wanted)], ids in zip(found, (usual, unusual), strict=True):
        assert tokens[wanted].tolist() == ids
        assert tokens[~wanted].tolist() == list(group.prompt_ids)
    few = CorrectRows(tmp_path / "few.jsonl", encoder, max_per_prompt=1)
    few.add([group])
    assert few.num_rows == 1 and "response_ids" not in few.path.read_text()


SHOWING = "{% for t in tools or [] %}{{ t.name }}{% endfor %}" + CHATML
"""A template that shows the names of tools before a chat."""


def episode_of(tokenizer):
    """A response with a turn of its environment after 4 tokens, and its group; both are correct."""
    end = tokenizer.eos_token_id
    ids = [*tokenizer.encode("12"), end, *tokenizer.encode("+="), *tokenizer.encode("9"), end]
    group = group_of(tokenizer, ids, ids)
    versions = np.array([0, 0, 0, NO_VERSION, NO_VERSION, 0, 0], dtype=np.int32)
    responses = [replace(one, policy_versions=versions) for one in group.responses]
    return replace(group, responses=tuple(responses), scores=(group.scores[0],) * 2), ids


def test_rows_of_episodes_do_not_train_on_what_the_model_only_read(tmp_path):
    tokenizer, encoder = encoder_of(SHOWING)
    tools = [{"name": "add"}]
    group, ids = episode_of(tokenizer)
    rows = CorrectRows(tmp_path / "correct.jsonl", encoder, lambda prompt: tools)
    rows.add([group])
    [line] = map(json.loads, rows.path.read_text().splitlines())
    assert (line["response_ids"], line["environment_spans"]) == (ids, [[3, 5]])
    [[(tokens, wanted)]] = load_answered(str(rows.path), encoder)
    prompt = render(group.prompt, tokenizer, tools=tools)
    assert tokenizer.decode(prompt).startswith("add")
    assert tokens.tolist() == [*prompt, *ids]
    assert wanted.tolist() == [False] * len(prompt) + [True] * 3 + [False] * 2 + [True] * 2


@pytest.mark.parametrize(
    "spans", [3, [3], [[3]], [[5, 3]], [[3, 5], [4, 6]], [[3, 8]], [[-1, 2]], [[0.5, 2]], [[3, 3]]]
)
def test_wrong_spans_of_environments_are_refused(tmp_path, spans):
    """They would train on other tokens than meant, without a word."""
    tokenizer, encoder = encoder_of()
    group, ids = episode_of(tokenizer)
    row = {"messages": [ASK, {**SAY, "content": encoder.text_of(ids)}], "response_ids": ids}
    path = write_jsonl(tmp_path / "rows.jsonl", row | {"environment_spans": spans})
    with pytest.raises(DataError, match="line 1: environment_spans are not ascending pairs"):
        load_answered(path, encoder)


def test_spans_without_the_tokens_that_they_count_are_refused(tmp_path):
    """The row would train on what its environment wrote."""
    _, encoder = encoder_of()
    row = {"messages": [ASK, SAY], "environment_spans": [[0, 1]]}
    with pytest.raises(DataError, match="environment_spans are not .* the 0 response_ids"):
        load_answered(write_jsonl(tmp_path / "rows.jsonl", row), encoder)
