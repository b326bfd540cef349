"""Pretraining data: lost or repeated text, wrong loss weights, and unreadable files."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megadapo.data.pretraining import PretrainingStream, pack_pretraining, read_texts
from megadapo.errors import DataError

END = 0
TEXTS = ["abc", "", "defghijklmnop", "q", "rs" * 9]


def encode(text: str) -> list[int]:
    """Return one token per letter."""
    return [*map(ord, text), END]


def stream(texts: list[str] = TEXTS, *, seed: int = 3, max_tokens: int = 6) -> PretrainingStream:
    return PretrainingStream(texts, encode, seed=seed, max_tokens=max_tokens)


def predicted(sequences: list[np.ndarray]) -> list[int]:
    return [token for sequence in sequences for token in sequence[1:].tolist()]


def test_every_token_is_predicted_once_per_epoch() -> None:
    """Also in texts longer than a sequence, for any token budget."""
    wanted = sorted(token for text in TEXTS if text for token in encode(text)[1:])
    for num_tokens in (6, 7, 50):
        texts, found = stream(), []
        while len(found) < len(wanted):
            found += predicted(texts.take(num_tokens))
        assert sorted(found[: len(wanted)]) == wanted


def test_sequences_respect_limits() -> None:
    texts = stream()
    for num_tokens in (6, 9, 31):
        sequences = texts.take(num_tokens)
        assert 0 < sum(map(len, sequences)) <= num_tokens
        assert all(2 <= len(sequence) <= 6 for sequence in sequences)


def test_order_depends_on_seed_and_epoch() -> None:
    one, same, other = (stream(seed=seed).take(200) for seed in (3, 3, 4))
    assert predicted(one) == predicted(same) != predicted(other)
    epoch = sum(len(text) for text in TEXTS)
    assert predicted(one)[:epoch] != predicted(one)[epoch : 2 * epoch]


def test_resume_in_the_middle_of_a_text() -> None:
    whole = stream()
    expected = [whole.take(7) for _ in range(12)]
    for stop in (1, 5, 11):
        first, second = stream(), stream()
        for _ in range(stop):
            first.take(7)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        rest = [second.take(7) for _ in range(stop, 12)]
        assert [predicted(part) for part in rest] == [predicted(p) for p in expected[stop:]]


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 4},
        {"max_tokens": 5},
        {"texts": TEXTS[:-1]},
        {"texts": ["ab", "c", *TEXTS[1:]]},
        {"texts": TEXTS[::-1]},
    ],
)
def test_state_of_other_texts_is_rejected(changed: dict[str, object]) -> None:
    found = stream(**changed).difference(stream().state_dict())
    assert "have changed since the checkpoint" in str(found)


def test_texts_without_targets_are_an_error() -> None:
    texts = PretrainingStream(["a", "b"], lambda text: [1], seed=0, max_tokens=8)
    with pytest.raises(DataError, match="nothing to predict"):
        texts.take(8)


def test_weights_normalise_per_update() -> None:
    parts = [np.arange(n, dtype=np.int64) for n in (2, 5, 3)]
    batch = pack_pretraining([parts[:2], parts[2:]], coef=0.5)
    assert batch.tokens.tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 2]
    weights = [0, 0.1, 0, 0.1, 0.1, 0.1, 0.1, 0, 0.25, 0.25]
    np.testing.assert_allclose(batch.loss_weights, weights, rtol=1e-7)
    np.testing.assert_array_equal(batch.advantages, batch.loss_weights > 0)
    assert [part.tolist() for part in batch.mini_batches] == [[0, 1], [2]]
    assert (batch.prompt_lengths == 1).all() and (batch.policy_versions == -1).all()


def test_every_file_type(tmp_path: Path) -> None:
    """Files are read by name; a .txt file is one text."""
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"text": "three", "id": 1}\n\n{"text": ""}\n')
    pq.write_table(pa.table({"id": [1, 2], "text": ["four", "fünf"]}), tmp_path / "c.parquet")
    (tmp_path / "notes.md").write_text("not read")
    assert read_texts(str(tmp_path)) == ["one\n\ntwo\n", "three", "four", "fünf"]
    assert read_texts(str(tmp_path / "a.txt")) == ["one\n\ntwo\n"]


def test_built_in_texts() -> None:
    """About half of them are worked out, always the same ones."""
    texts = read_texts("arithmetic:train:64")
    assert texts == read_texts("arithmetic:train:64") != read_texts("arithmetic:train:64:1")
    assert 16 < sum(";" in text for text in texts) < 48
    for text in texts:
        problem, _, rest = text.partition("=?")
        answer = rest.rpartition("Answer: ")[2]
        assert int(answer) == sum(map(int, problem.split("+")))


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", b'{"text": 7}\n', "a.jsonl, line 1: text is not a string"),
        ("a.jsonl", b'{"texts": "x"}\n', "a.jsonl, line 1: text is not a string"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl, line 1: text is not valid Unicode"),
        ("a.jsonl", b"[1]\n", "not a JSON object"),
        ("a.jsonl", b'{"text": ""}\n', "has no text"),
        ("a.txt", b"\xff\xfe", "a.txt cannot be read as UTF-8"),
        ("a.txt", b"", "has no text"),
        ("a.parquet", b"PAR1", "cannot be read as parquet"),
        ("a.tsv", b"x", "neither"),
    ],
)
def test_malformed_text_is_reported(
    tmp_path: Path, name: str, content: bytes, problem: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=problem):
        read_texts(str(tmp_path / name))


def test_parquet_without_text_column_is_rejected(tmp_path: Path) -> None:
    pq.write_table(pa.table({"content": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="has no column text; it has content"):
        read_texts(str(tmp_path / "a.parquet"))
