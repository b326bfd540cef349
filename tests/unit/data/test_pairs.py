"""Preference pairs: unreadable rows, and a score at another token than the last of an answer."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from megadapo.data.pairs import Pair, PairRows, conversation_tokens, load_pairs, pack_pairs
from megadapo.errors import DataError
from tests.support.rollout.saved_groups import saved_group, saved_response
from tests.support.rows import write_jsonl

CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTION, RIGHT, WRONG = {"role": "user", "content": "1+2=?"}, "3", "4"
SHAPES = {
    "text": {"prompt": "1+2=?", "chosen": RIGHT, "rejected": WRONG},
    "chat prompt": {"prompt": [QUESTION], "chosen": RIGHT, "rejected": WRONG},
    "messages": {"messages": [QUESTION], "chosen": RIGHT, "rejected": WRONG},
    "chat answers": {
        "prompt": [QUESTION],
        "chosen": [{"role": "assistant", "content": RIGHT}],
        "rejected": [{"role": "assistant", "content": WRONG}],
    },
    "prompt in the answers": {
        "chosen": [QUESTION, {"role": "assistant", "content": RIGHT}],
        "rejected": [QUESTION, {"role": "assistant", "content": WRONG}],
    },
}
# the prompt must not be there twice
SHAPES["prompt beside whole chats"] = {"prompt": "1+2=?", **SHAPES["prompt in the answers"]}
SHAPES["messages beside whole chats"] = {
    "messages": SHAPES["prompt in the answers"]["chosen"],
    **SHAPES["prompt in the answers"],
}


@pytest.fixture(params=[None, CHATML], ids=["no-template", "template"])
def tokenizer(request):
    loaded = AutoTokenizer.from_pretrained("configs/quickstart-base")
    loaded.chat_template = request.param
    return loaded


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_a_row_gives_the_same_tokens(tokenizer, tmp_path, shape):
    (pair,) = load_pairs(
        write_jsonl(tmp_path / "pairs.jsonl", SHAPES[shape]), tokenizer, max_tokens=64
    )
    pq.write_table(pa.Table.from_pylist([SHAPES[shape]]), tmp_path / "pairs.parquet")
    (same,) = load_pairs(str(tmp_path / "pairs.parquet"), tokenizer, max_tokens=64)
    expected = "1+2=?3<|endoftext|>"
    if tokenizer.chat_template:
        expected = "<user>1+2=?<|endoftext|>\n<assistant>3<|endoftext|>\n"
    assert tokenizer.decode(pair.chosen) == tokenizer.decode(same.chosen) == expected
    assert tokenizer.decode(pair.rejected) == expected.replace("3<", "4<")


def test_plain_answer_ends_once(tokenizer):
    """A text that already has the end-of-sequence token gets no second one."""
    tokenizer.chat_template = None
    ids = conversation_tokens((("user", "a"), ("assistant", "b<|endoftext|>")), tokenizer)
    assert tokenizer.decode(ids) == "ab<|endoftext|>"
    tokenizer.eos_token = None
    ids = conversation_tokens((("user", "a"), ("assistant", " None")), tokenizer)
    assert tokenizer.decode(ids) == "a None"


BAD = {
    "same": ({**SHAPES["text"], "rejected": RIGHT}, "the same text"),
    "no-prompt": ({"chosen": RIGHT, "rejected": WRONG}, "needs a prompt"),
    "no-answer": ({"prompt": "1", "chosen": RIGHT}, "rejected is not a string"),
    "role": ({**SHAPES["text"], "chosen": [{"content": "3"}]}, "a role and a content"),
    "other-prompt": ({"prompt": "2+2=?", **SHAPES["prompt in the answers"]}, "does not begin with"),
    "long": ({**SHAPES["text"], "rejected": "9" * 90}, "at most 64"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_row_is_named(tokenizer, tmp_path, case):
    row, reason = BAD[case]
    source = write_jsonl(tmp_path / "pairs.jsonl", SHAPES["text"], row)
    with pytest.raises(DataError, match=f"line 2.*{reason}"):
        load_pairs(source, tokenizer, max_tokens=64)


def test_overlong_pairs_can_be_left_out(tokenizer, tmp_path):
    source = write_jsonl(tmp_path / "pairs.jsonl", BAD["long"][0], SHAPES["text"])
    assert len(load_pairs(source, tokenizer, max_tokens=64, overlong="drop")) == 1
    with pytest.raises(DataError, match="no usable pair"):
        load_pairs(source, tokenizer, max_tokens=3, overlong="drop")


def test_packed_pairs_have_one_scored_entry_behind_each_answer():
    """Entry t describes hidden state t - 1: the answer's last token, of any length."""
    pairs = [Pair(np.array([5, 6, 7]), np.array([5, 8])), Pair(np.array([1]), np.array([2, 3]))]
    batch = pack_pairs([pairs[:1], pairs[1:]])
    scored = batch.cu_seqlens[1:] - 1
    assert batch.tokens[scored - 1].tolist() == [7, 8, 1, 3]
    assert np.flatnonzero(batch.loss_weights).tolist() == scored.tolist()
    assert (np.diff(batch.cu_seqlens) - batch.prompt_lengths).tolist() == [1] * 4
    assert [part.tolist() for part in batch.mini_batches] == [[0, 1], [2, 3]]


def group_of(*texts):
    """A group whose correct responses say 3."""
    return saved_group(*(saved_response(text, correct="3" in text) for text in texts)).group


def test_rows_pair_different_texts_of_a_group(tmp_path, tokenizer):
    """A text that is in several pairs would weigh more than the others of its prompt."""
    rows = PairRows(tmp_path / "pairs.jsonl")
    rows.add([group_of("3", "4", "3", "is 3", "5", "6"), group_of("3", "is 3"), group_of("7")])
    rows.add([group_of("3.", "3", "4", "8")])
    assert rows.num_rows == 3 and "3 pairs of responses to 1 prompts" in rows.summary
    written = [json.loads(line) for line in rows.path.read_text().splitlines()]
    assert [(row["chosen"], row["rejected"]) for row in written] == [
        ("3", "4"),
        ("is 3", "5"),
        ("3.", "8"),
    ]
    assert {row["prompt_id"] for row in written} == {"id-7"}
    pairs = load_pairs(str(rows.path), tokenizer, max_tokens=64)
    assert "1+1=?" in tokenizer.decode(pairs[1].chosen)
    few = PairRows(tmp_path / "few.jsonl", max_per_prompt=1)
    few.add([group_of("3", "4", "is 3", "5")])
    assert few.num_rows == 1
