"""Columns of any file: a guess that is wrong, or texts around a prompt that are lost."""

import datetime
import logging
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megadapo.codec import decode, encode
from megadapo.config import load_config
from megadapo.data.answered import read_answered_rows
from megadapo.data.arithmetic import generate
from megadapo.data.config import DataColumns
from megadapo.data.overlap import warn_of_overlap
from megadapo.data.prompts import Prompt, load_prompts, warn_of_contradictions
from megadapo.data.rows import ALL_COLUMNS
from megadapo.errors import ConfigError, DataError
from tests.support import REPOSITORY
from tests.support.rows import write_jsonl

QUICKSTART = REPOSITORY / "configs" / "quickstart.toml"


def read(
    source: str, *, with_extra_info: bool = False, further: tuple[str, ...] = (), **columns: str
) -> list[Prompt]:
    return load_prompts(
        source,
        check_gold=lambda gold, _: str(gold),
        columns=DataColumns(**columns),
        with_extra_info=with_extra_info,
        further=further,
    )


def asked(*texts: str) -> list[tuple]:
    return [(("user", text),) for text in texts]


def test_question_and_answer_load_with_one_changed_key(tmp_path):
    source = write_jsonl(tmp_path / "sums.jsonl", {"question": "1+2?", "answer": 3})
    config = load_config(QUICKSTART, [f"data.train={source}"])
    (found,) = load_prompts(
        config.data.train, check_gold=config.reward.check_gold, columns=config.data.columns
    )
    assert (found.messages, found.ground_truth) == (asked("1+2?")[0], "3")
    assert found.data_source == "sums"


def test_gsm8k_loads_with_one_changed_key(tmp_path):
    answers = ["She has 3 + 4 = 7.\n#### 7", "First #### none\n#### 1,000 "]
    table = pa.table({"question": ["a?", "b?"], "answer": answers})
    pq.write_table(table, tmp_path / "train.parquet")
    config = load_config(QUICKSTART, [f"data.train={tmp_path}/train.parquet"])
    found = load_prompts(
        config.data.train, check_gold=config.reward.check_gold, columns=config.data.columns
    )
    assert [p.messages for p in found] == asked("a?", "b?")
    assert [p.ground_truth for p in found] == ["7", "1,000"]


def test_marks_count_only_if_every_gold_has_one(tmp_path, caplog):
    rows = [{"question": "a", "answer": "x\n#### 7"}, {"question": "b", "answer": "8"}]
    source = write_jsonl(tmp_path / "a.jsonl", *rows)
    with caplog.at_level(logging.WARNING):
        assert [p.ground_truth for p in read(source)] == ["x\n#### 7", "8"]
    assert "line 2: answer has no line that begins with '#### '" in caplog.text
    whole = write_jsonl(tmp_path / "b.jsonl", rows[0])
    assert read(whole, ground_truth_pattern="")[0].ground_truth == "x\n#### 7"
    nested = write_jsonl(
        tmp_path / "c.jsonl", {"prompt": "a", "reward_model": {"ground_truth": rows[0]["answer"]}}
    )
    assert read(nested)[0].ground_truth == "x\n#### 7"


@pytest.mark.parametrize(
    ("row", "prompt", "gold"),
    [
        ({"problem": "p", "solution": "long", "answer": "5"}, "p", "5"),
        ({"prompt": None, "question": "q", "ground_truth": "1", "answer": "2"}, "q", "1"),
        ({"messages": [{"role": "user", "content": "m"}], "solution": "4"}, "m", "4"),
        ({"prompt": "p", "answer": "2", "reward_model": {"ground_truth": "1"}}, "p", "1"),
    ],
)
def test_usual_columns_are_found(tmp_path, row, prompt, gold):
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    for source in (write_jsonl(tmp_path / "a.jsonl", row), str(tmp_path / "a.parquet")):
        (found,) = read(source)
        assert (found.messages[0][1], found.ground_truth) == (prompt, gold)


def test_named_columns_win(tmp_path):
    row = {"question": "q", "answer": "1", "task": {"text": "t", "gold": "x = 2"}, "kind": "k"}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    names = {"prompt": "task.text", "ground_truth": "task.gold", "data_source": "kind"}
    for source in (write_jsonl(tmp_path / "a.jsonl", row), str(tmp_path / "a.parquet")):
        (found,) = read(source, **names, ground_truth_pattern="= (.*)")
        assert found.messages == asked("t")[0]
        assert (found.ground_truth, found.data_source) == ("2", "k")


def test_texts_are_put_around_a_prompt(tmp_path):
    examples = write_jsonl(
        tmp_path / "few.jsonl",
        {"question": "1?", "answer": "one"},
        {"messages": [{"role": "user", "content": "2!"}, {"role": "assistant", "content": "two"}]},
    )
    texts = {"system": "S", "template": "Q: {prompt}\nA:", "examples": examples}
    chat = (
        *(("system", "S"), ("user", "Q: 1?\nA:"), ("assistant", "one")),
        *(("user", "2!"), ("assistant", "two"), ("user", "Q: 3?\nA:")),
    )
    source = write_jsonl(tmp_path / "a.jsonl", {"question": "3?", "answer": "three"})
    assert [prompt.messages for prompt in read(source, **texts)] == [chat]
    (row,) = read_answered_rows(source, DataColumns(**texts))
    assert row.conversation == (*chat, ("assistant", "three"))
    (problem,) = read("arithmetic:train:1", **texts, prompt="none-such")
    assert problem.messages[0] == ("system", "S") and len(problem.messages) == 6
    twice = write_jsonl(
        tmp_path / "b.jsonl", {"prompt": [{"role": "system", "content": "T"}], "answer": "3"}
    )
    with pytest.raises(DataError, match=r"line 1: the prompt has a system message; leave out data"):
        read(twice, system="S")


def test_wrong_keys_are_refused():
    for wrong, said in (
        ({"template": "no mark"}, "has no {prompt}"),
        ({"ground_truth_pattern": "(a"}, "no regular expression of RE2"),
        ({"ground_truth_pattern": "a*"}, "matches an empty line"),
    ):
        with pytest.raises(ConfigError, match=said):
            DataColumns(**wrong)


def test_hidden_state_makes_prompts_different(tmp_path, caplog):
    """Environments ask the same question about different secrets."""
    rows = [
        {
            "question": "Guess.",
            "answer": gold,
            "data_source": "guess",
            "extra_info": {"secret": secret, "index": index},
        }
        for index, (gold, secret) in enumerate([("a", 1), ("b", 2), ("a", 1), ("c", 3), ("d", 3)])
    ]
    source = write_jsonl(tmp_path / "a.jsonl", *rows, {"question": "Other?", "answer": "e"})
    found = read(source, with_extra_info=True)
    assert [p.ground_truth for p in found] == ["a", "b", "e"]
    assert "prompts with two gold answers dropped:\n" in caplog.text
    reordered = write_jsonl(tmp_path / "b.jsonl", *rows[::-1])
    again = read(reordered, with_extra_info=True)
    ids = [prompt.id for prompt in found]
    assert len({*ids}) == 3 and {prompt.id for prompt in again} == {*ids[:2]}
    # without a reader of extra_info, the same question with two golds is a contradiction
    assert [p.ground_truth for p in read(source)] == ["e"]
    caplog.clear()
    warn_of_contradictions(found)
    warn_of_overlap(found, found[:2])
    assert caplog.text == ""
    warn_of_overlap(found, found[2:])
    assert "1 of 1 held-out problems" in caplog.text


def test_columns_that_a_function_takes_make_prompts_different(tmp_path):
    """Otherwise the first of several rubrics would be trained on alone."""
    rows = [
        {"question": "Q", "answer": 2, "rubric": rubric, "id": number, "data_source": source}
        for number, (rubric, source) in enumerate([("a", "s"), ("b", "s"), ("a", "s"), ("a", "t")])
    ]
    source = write_jsonl(tmp_path / "a.jsonl", *rows)
    parquet = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), parquet)
    for file in (source, str(parquet)):
        found = read(file, with_extra_info=True, further=("rubric",))
        assert [(p.further, p.data_source) for p in found] == [
            *(({"rubric": "a"}, "s"), ({"rubric": "b"}, "s"), ({"rubric": "a"}, "t"))
        ]
        assert all(prompt.is_text for prompt in found) and len({p.id for p in found}) == 3
        everything = read(file, with_extra_info=True, further=(ALL_COLUMNS,))
        assert everything[0].further == {"answer": 2, "rubric": "a", "id": 0}
        assert decode(Prompt, encode(everything[0])) == everything[0]
        # rows that differ in data_source are scored by other functions
        assert [prompt.data_source for prompt in read(file)] == ["s", "t"]


def test_further_facts_are_values_of_json(tmp_path):
    """NaN in a fact would make the prompt unequal to itself, and a date could not be sent on."""
    facts = {"share": math.nan, "parts": [math.inf, 1.5], "day": datetime.date(2026, 1, 2)}
    row = {"question": "Q", "answer": "1", "extra_info": facts, "rubric": facts}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    (found,) = read(str(tmp_path / "a.parquet"), with_extra_info=True, further=("rubric",))
    plain = {"share": None, "parts": [None, 1.5], "day": "2026-01-02"}
    assert found.extra_info == found.further["rubric"] == plain


def test_empty_first_value_does_not_decide_for_the_file(tmp_path):
    rows = [{"prompt": None, "question": "Q", "answer": "1"}, {"prompt": "P", "answer": "2"}]
    with pytest.raises(DataError, match=r"line 2: prompt has a value, and in .*line 1 it has none"):
        read(write_jsonl(tmp_path / "a.jsonl", *rows))
    golds = [{"prompt": "P", "answer": "1"}, {"prompt": "Q", "answer": "", "ground_truth": "2"}]
    with pytest.raises(DataError, match="line 2: ground_truth has a value"):
        read(write_jsonl(tmp_path / "b.jsonl", *golds))
    named = read(
        write_jsonl(tmp_path / "c.jsonl", golds[0], {**golds[1], "answer": "3"}),
        ground_truth="answer",
    )
    assert [prompt.ground_truth for prompt in named] == ["1", "3"]


def test_chat_that_shows_its_answer_is_refused(tmp_path):
    """Rows for fine-tuning have this form, and accuracy would begin near 1."""
    turns = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "3"}]
    source = write_jsonl(tmp_path / "a.jsonl", {"messages": turns, "answer": "3"})
    with pytest.raises(DataError, match="line 1: messages ends with a message of the assistant"):
        read(source)


def test_ids_of_verl_rows_stay(tmp_path):
    """Checkpoints and journals name prompts by these ids; repeated rows differ in their index."""
    rows = [problem.row() for problem in generate("train", 2, seed=0)]
    repeated = [{**row, "extra_info": {"index": i, "split": "t"}} for i, row in enumerate(rows * 3)]
    source = write_jsonl(tmp_path / "a.jsonl", *repeated)
    recorded = ["1b153c64cf889dc9", "2b44a99bcd7a5c41"]
    assert [prompt.id for prompt in read(source)] == recorded
    assert [prompt.id for prompt in read(source, with_extra_info=True)] == recorded
