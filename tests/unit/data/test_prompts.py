"""Loading prompts, whose bad rows need a clear error, and their order, which a resume repeats."""

import hashlib
import json
import logging
import math
import re
import time
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megadapo.codec import decode, encode
from megadapo.data.arithmetic import generate
from megadapo.data.prompts import Prompt, PromptStream, load_prompts, render
from megadapo.errors import DataError
from megadapo.rewards.config import RewardConfig
from megadapo.rewards.rules import validate_ground_truth
from tests.support.rows import write_jsonl, write_parquet
from tests.support.tokenizers.small import write_tokenizer as write_small_tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def check_gold(gold: object, data_source: str) -> str:
    return validate_ground_truth(gold)


def row(content: str, gold: object = "42", source: str = "math") -> dict:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"ground_truth": gold, "style": "rule"},
        "extra_info": {"index": "any"},
    }


def read(source: str, **options) -> list[Prompt]:
    return load_prompts(source, check_gold=check_gold, **options)


@pytest.fixture
def counts(caplog) -> Callable[[], list[int]]:
    """Return the logged numbers of prompts, rows, repeated, contradictory and too long ones."""
    caplog.set_level(logging.INFO)
    return lambda: [int(number) for number in re.findall(r" (\d+) ", caplog.messages[-1])]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character."""
    characters = {chr(code): code for code in range(128)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(characters, unk_token="\x00"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=model)


def test_parquet_and_jsonl_give_the_same_prompts(tmp_path, counts) -> None:
    problems = generate("train", 50, seed=0)
    write_parquet(tmp_path / "a.parquet", problems)
    jsonl = write_jsonl(tmp_path / "a.jsonl", *[problem.row() for problem in problems])
    from_parquet = read(str(tmp_path / "a.parquet"))
    assert counts() == [50, 50, 0, 0, 0]
    assert from_parquet == read(jsonl) == read("arithmetic:train:50")
    assert from_parquet[0] == Prompt(
        from_parquet[0].id, (("user", problems[0].text),), str(problems[0].answer), "arithmetic"
    )


def test_duplicates_are_dropped_in_order(tmp_path, counts) -> None:
    rows = [row(f"question {i}") for i in (3, 1, 2)] * 100
    prompts = read(write_jsonl(tmp_path / "a.jsonl", *rows))
    assert [p.messages[0][1] for p in prompts] == ["question 3", "question 1", "question 2"]
    assert counts() == [3, 300, 297, 0, 0]


def test_ids_are_distinct_and_independent_of_the_file(tmp_path) -> None:
    rows = [row("a"), row("b"), row("ab"), row("c", "7"), row("d", source="other")]
    rows.append(row("a") | {"prompt": [{"role": "system", "content": "a"}]})
    first = read(write_jsonl(tmp_path / "a.jsonl", *rows))
    assert len({prompt.id for prompt in first}) == 6
    again = read(write_jsonl(tmp_path / "b.jsonl", *rows[::-1]))
    assert {(p.id, p.messages) for p in first} == {(p.id, p.messages) for p in again}
    assert {len(prompt.id) for prompt in first} == {16}


def test_prompts_survive_json_exactly() -> None:
    prompt = Prompt("id", (("system", "Add."), ("user", "1+2=?")), "3", "test")
    values = json.loads(json.dumps(encode(prompt)))
    assert decode(Prompt, values) == prompt
    assert values["messages"] == [["system", "Add."], ["user", "1+2=?"]]


def test_conflicting_golds_are_dropped_and_listed(tmp_path, caplog, counts) -> None:
    bad = [("bad", "1"), ("bad", "2"), ("bad", "1"), ("bad", "3"), ("x", "1"), ("x", "2")]
    rows = [row("good"), *(row(*one) for one in bad)]
    source = write_jsonl(tmp_path / "a.jsonl", *rows)
    assert [p.messages[0][1] for p in read(source)] == ["good"]
    assert counts() == [1, 7, 1, 2, 0]
    assert caplog.messages[0] == (
        f"{source}: prompts with two gold answers dropped:\n"
        f"{source}, line 3: '2', and before '1'\n{source}, line 7: '2', and before '1'"
    )


def test_gold_answers_that_an_environment_hides_make_other_prompts(tmp_path, counts) -> None:
    """A game with one text and many hidden numbers had no usable prompt."""
    rows = [row("Guess.", "1"), row("Guess.", "2"), row("Guess.", "1")]
    reward = RewardConfig(functions=("environment",))
    hides = {"check_gold": reward.check_gold, "hides_gold": reward.hides_gold}
    found = load_prompts(write_jsonl(tmp_path / "a.jsonl", *rows), **hides)
    assert [prompt.ground_truth for prompt in found] == ["1", "2"]
    assert len({prompt.id for prompt in found}) == 2 and counts() == [2, 3, 1, 0, 0]
    # a rule compares with the gold answer, so one text has one
    assert not RewardConfig(functions=("environment", "answer")).hides_gold("test")


def test_limit_needs_tokenizer_and_length(tmp_path, tokenizer) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", row("xxxx"))
    assert len(read(source, max_prompt_tokens=1)) == len(read(source, tokenizer=tokenizer)) == 1


@pytest.mark.parametrize("num_bad, last", [(5, "line 5"), (6, "... and 1 more")])
def test_five_bad_golds_are_listed(tmp_path, num_bad, last) -> None:
    rows = [row(f"question {i}", "units") for i in range(num_bad)]
    with pytest.raises(DataError) as error:
        read(write_jsonl(tmp_path / "a.jsonl", *rows))
    lines = str(error.value).splitlines()
    assert len(lines) == min(num_bad, 6) and last in lines[-1]


def test_bad_gold_error_has_file_row_and_text(tmp_path) -> None:
    rows = [row(f"question {i}", "units" if i >= 2 else "5") for i in range(10)]
    rows[4] = row("question 4", None)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(DataError) as error:
        read(str(tmp_path / "a.parquet"))
    text = str(error.value)
    assert "a.parquet, row 2: the gold answer 'units' cannot be scored" in text
    assert "row 4: the gold answer is not a string but NoneType None" in text
    assert "and 3 more" in text and "row 1:" not in text


def test_gold_in_fp32_is_the_number_that_was_written(tmp_path) -> None:
    """The Python float of an fp32 value has digits that no response writes."""
    table = pa.table({"question": ["a", "b"], "answer": pa.array([0.1, -1.5e-6], pa.float32())})
    pq.write_table(table, tmp_path / "a.parquet")
    prompts = read(str(tmp_path / "a.parquet"))
    assert [one.ground_truth for one in prompts] == ["0.1", "-0.0000015"]


def test_gold_that_is_a_number_is_accepted(tmp_path) -> None:
    assert read(write_jsonl(tmp_path / "b.jsonl", row("a", 7.0)))[0].ground_truth == "7"
    assert read(write_jsonl(tmp_path / "b.jsonl", row("a", 0.5)))[0].ground_truth == "0.5"
    assert read(write_jsonl(tmp_path / "b.jsonl", row("a", 1e-5)))[0].ground_truth == "0.00001"
    assert read(write_jsonl(tmp_path / "a.jsonl", row("a", -7)))[0].ground_truth == "-7"
    for gold in (math.nan, True, ["7"], {}):
        with pytest.raises(DataError, match="line 1: the gold answer is not a string"):
            read(write_jsonl(tmp_path / "a.jsonl", row("a", gold)))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"prompt": 11}, "line 2: prompt is neither a text nor a list of chat messages: 11"),
        ({"prompt": []}, "line 2: prompt is neither a text nor a list of chat messages"),
        ({"prompt": ["1+1"]}, "line 2: a chat message needs a role and a content"),
        ({"prompt": [{"role": "user"}]}, "line 2: a chat message needs a role and a content"),
        ({"prompt": [{"role": "user", "content": None}]}, "line 2: a chat message needs"),
        ({"prompt": [{"role": "user", "content": "\ud800"}]}, "line 2: .* not valid Unicode"),
        ({"reward_model": "42"}, "line 2: reward_model.ground_truth is missing"),
        ({"reward_model": {}}, "line 2: reward_model.ground_truth is missing"),
        ({"data_source": None}, "line 2: data_source is not a string"),
    ],
)
def test_malformed_row_is_reported(tmp_path, damage: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(write_jsonl(tmp_path / "a.jsonl", row("fine"), row("other") | damage))


def test_overlong_prompts_are_errors_or_dropped(tmp_path, tokenizer, counts) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", *[row("x" * n) for n in (3, 10, 11, 12)])
    limit = {"tokenizer": tokenizer, "max_prompt_tokens": 10}
    prompts = read(source, overlong_prompts="drop", **limit)
    assert [len(p.messages[0][1]) for p in prompts] == [3, 10]
    assert counts() == [2, 4, 0, 0, 2]
    with pytest.raises(DataError) as error:
        read(source, **limit)
    first, second, advice = str(error.value).splitlines()
    assert first.endswith("has 11 tokens; at most 10 are allowed") and "has 12 tokens" in second
    assert advice == 'Raise data.max_prompt_tokens, or set data.overlong_prompts = "drop"'
    with pytest.raises(DataError, match="no usable prompt"):
        read(source, overlong_prompts="drop", tokenizer=tokenizer, max_prompt_tokens=2)


def test_render_without_template(tokenizer) -> None:
    prompt = Prompt("id", (("system", "Add."), ("user", "1+2=?")), "3", "test")
    assert render(prompt, tokenizer) == [ord(char) for char in "Add.1+2=?"]
    assert len(render(prompt, tokenizer, max_prompt_tokens=9)) == 9
    with pytest.raises(DataError, match="has 9 tokens; at most .* = 8"):
        render(prompt, tokenizer, max_prompt_tokens=8)
    with pytest.raises(DataError, match="has no tokens"):
        render(Prompt("id", (("user", ""),), "3", "test"), tokenizer)


def test_content_of_text_parts_is_one_text(tmp_path) -> None:
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1=?"}]
    whole = row("1+1=?")
    split = {**whole, "prompt": [{"role": "user", "content": parts}]}
    [one], [two] = (read(write_jsonl(tmp_path / "a.jsonl", one)) for one in (whole, split))
    assert one == two
    for other in ({"type": "image", "url": "x"}, {"type": "text"}, "1+1"):
        split["prompt"][0]["content"] = [parts[0], other]
        with pytest.raises(DataError, match="or parts of type text as content"):
            read(write_jsonl(tmp_path / "a.jsonl", split))


def test_prompt_of_millions_of_characters_is_not_encoded(tmp_path) -> None:
    """Encoding it to find that it is too long took most of a minute."""
    tokenizer = AutoTokenizer.from_pretrained(write_small_tokenizer("qwen3", tmp_path))
    source = write_jsonl(tmp_path / "long.jsonl", row("1" * 30_000_000), row("1"))
    options = {"tokenizer": tokenizer, "max_prompt_tokens": 64}
    start = time.monotonic()
    with pytest.raises(DataError, match="has 30000 tokens; at most 64"):
        read(source, **options)
    assert len(read(source, **options, overlong_prompts="drop")) == 1
    assert time.monotonic() - start < 10.0


@pytest.mark.parametrize(
    "template",
    ["{% for i in range(10 ** 9) %}x{% endfor %}", "{{ 1 / 0 }}", "{{ messages[9].a.b }}"],
)
def test_template_that_fails_is_named(tmp_path, template) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_small_tokenizer("qwen3", tmp_path))
    tokenizer.chat_template = template
    [prompt] = read(write_jsonl(tmp_path / "a.jsonl", row("1+1")))
    with pytest.raises(DataError, match="does not fit the tokenizer's chat template"):
        render(prompt, tokenizer)


def test_prompt_that_is_a_rendered_chat_is_named(tmp_path, caplog) -> None:
    """Its names of control tokens are plain text, and no model has learned that."""
    folder = write_small_tokenizer("qwen3", tmp_path / "qwen3")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [row("1"), row("<|im_start|>user\n2<|im_end|>"), row("about <think>")]
    source = write_jsonl(tmp_path / "a.jsonl", *rows)
    read(source, tokenizer=tokenizer, max_prompt_tokens=99)
    [said] = [text for text in caplog.messages if "control tokens" in text]
    assert "2 prompts have names of control tokens such as <|im_start|>" in said


def test_render_with_template(tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", CHAT_TEMPLATE)
    prompt = Prompt("id", (("system", "Add."), ("user", "1+2=?")), "3", "test")
    assert render(prompt, tokenizer) == [ord(char) for char in "<system>Add.<user>1+2=?>"]
    with pytest.raises(DataError, match="does not fit .*: unknown role judge"):
        render(Prompt("id", (("judge", "1+2=?"),), "3", "test"), tokenizer)


PROMPTS = [Prompt(f"{i:02d}", (("user", f"question {i}"),), str(i), "test") for i in range(7)]
RECORDED = ["06", "01", "02", "04", "03", "00", "05", "01", "05"]


def ids(stream: PromptStream, stop: int, start: int = 0) -> list[str]:
    return [stream.at(index).id for index in range(start, stop)]


def test_each_epoch_is_a_new_permutation() -> None:
    stream = PromptStream(PROMPTS, seed=0)
    epochs = [ids(stream, 7 * (epoch + 1), 7 * epoch) for epoch in range(4)]
    assert all(sorted(epoch) == [prompt.id for prompt in PROMPTS] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_prompt_depends_on_the_position_alone() -> None:
    """A resumed run returns to earlier positions."""
    whole = ids(PromptStream(PROMPTS, seed=3), 60)
    stream = PromptStream(PROMPTS, seed=3)
    for index in (59, 0, 30, 7, 6, 58, 14, 13, 0):
        assert stream.at(index).id == whole[index]


def test_seed_and_shuffle() -> None:
    orders = {tuple(ids(PromptStream(PROMPTS, seed), 7)) for seed in range(20)}
    assert len(orders) > 15
    in_file = [prompt.id for prompt in PROMPTS]
    assert ids(PromptStream(PROMPTS, 0, shuffle=False), 14) == in_file * 2


def test_order_and_fingerprint_are_recorded() -> None:
    """Others after an upgrade would break or block the resume of every saved run."""
    assert ids(PromptStream(PROMPTS, seed=0), 9) == RECORDED
    fingerprint = hashlib.sha256(b"00010203040506").hexdigest()
    assert PromptStream(PROMPTS, seed=0).state_dict()["fingerprint"] == fingerprint


def test_state_of_another_stream_is_rejected() -> None:
    state = PromptStream(PROMPTS, seed=0).state_dict()
    changed = r"^the prompts have changed since the checkpoint was saved \(finger"
    saved_with = "^the checkpoint was saved with another"
    for other, message in [
        (PromptStream(PROMPTS[:-1], seed=0), changed),
        (PromptStream(PROMPTS[::-1], seed=0), changed),
        (PromptStream([*PROMPTS, PROMPTS[0]], seed=0), changed),
        (PromptStream(PROMPTS, seed=1), rf"{saved_with} seed \(seed 0 there, 1 here\)"),
        (PromptStream(PROMPTS, 0, shuffle=False), rf"{saved_with} data.shuffle \(shuffle True"),
    ]:
        assert re.match(message, str(other.difference(state)))


def test_prompts_are_the_same_in_a_copy_of_their_file(tmp_path) -> None:
    """A run could not resume from a copy."""
    plain = [{"question": f"question {i}", "answer": "1"} for i in range(4)]
    named = [{**one, "data_source": "math"} for one in plain]
    for rows in (plain, named):
        first, second = (read(write_jsonl(tmp_path / f"{name}.jsonl", *rows)) for name in "ab")
        assert [prompt.id for prompt in first] == [prompt.id for prompt in second]
        state = PromptStream(first, seed=0).state_dict()
        assert PromptStream(second, seed=0).difference(state) is None
        has_changed = PromptStream(second[::-1], seed=0).difference(state)
        assert "prompts have changed" in str(has_changed)


def test_state_survives_json() -> None:
    stream = PromptStream(PROMPTS, seed=0)
    assert stream.difference(json.loads(json.dumps(stream.state_dict()))) is None
    assert "prompts have changed" in str(stream.difference({}))


def test_empty_stream_is_rejected() -> None:
    with pytest.raises(DataError, match="no prompts"):
        PromptStream([], seed=0)
