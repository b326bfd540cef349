"""Texts for a language-model loss: cut to sequences, in an order that can resume."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megadapo.data.batch import PackedBatch
from megadapo.data.order import EpochOrder
from megadapo.data.policy_versions import NO_VERSION
from megadapo.data.sources import read_text_rows
from megadapo.errors import DataError


def read_texts(source: str) -> list[str]:
    """The texts of a source in its order, empty ones left out.

    Args:
        source: a parquet or JSONL file with a column `text`, a .txt file, which is one text, a
            folder of them, a Hub dataset ORG/NAME[@REVISION][/PATH], or a built-in task, whose
            texts are problems with their answers.

    Raises:
        DataError: names the file and row of whatever cannot be read.
    """
    texts = [text for row in read_text_rows(source) if (text := row.text)]
    if not texts:
        raise DataError(f"{source} holds no text")
    return texts


class TextStream:
    """Endless sequences of tokens from texts, epoch after epoch in an order from a seed alone.

    A text ends with the end-of-sequence token. A long one gives several sequences, of which each
    begins with the last token of the one before: every token of a text but the first is predicted
    once.
    """

    def __init__(
        self,
        texts: Sequence[str],
        encode: Callable[[str], list[int]],
        *,
        seed: int,
        max_tokens: int,
    ) -> None:
        """
        Args:
            encode: the tokens of a text, the end-of-sequence token included.
            max_tokens: longest sequence.
        """
        assert max_tokens > 1, "one token predicts nothing"
        self._texts = texts
        self._encode = encode
        self._order = EpochOrder(len(texts), seed, name="texts")
        self._max_tokens = max_tokens
        digest = hashlib.sha256(f"{seed}/{max_tokens}".encode())
        for text in texts:
            # a length apart from its text, so that no two lists run into each other
            digest.update(f"/{len(text)}/".encode() + text.encode())
        self._fingerprint = digest.hexdigest()
        self._place, self._offset = 0, 0
        """Of the next sequence: which text comes, and the token that it begins with."""

    def take(self, num_tokens: int) -> list[np.ndarray]:
        """The next sequences, each [n] int64, of together at most `num_tokens` tokens.

        Raises:
            DataError: no text has two tokens.
        """
        assert num_tokens >= self._max_tokens, "the next sequence must fit"
        taken: list[np.ndarray] = []
        num_skipped = 0
        while True:
            ids = self._encode(self._texts[self._order.at(self._place)])
            if len(ids) < 2:
                num_skipped += 1
                if num_skipped > len(self._texts):
                    raise DataError("no text has two tokens, so there is nothing to predict")
                self._place += 1
                continue
            num_skipped = 0
            while self._offset < len(ids) - 1:
                sequence = ids[self._offset : self._offset + self._max_tokens]
                if len(sequence) > num_tokens:
                    return taken
                taken.append(np.array(sequence, dtype=np.int64))
                num_tokens -= len(sequence)
                self._offset += len(sequence) - 1
            self._place, self._offset = self._place + 1, 0

    def state_dict(self) -> dict[str, object]:
        """Where the stream stands, as JSON can hold it."""
        return {"fingerprint": self._fingerprint, "place": self._place, "offset": self._offset}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            DataError: that was of other texts or another order.
        """
        if state.get("fingerprint") != self._fingerprint:
            raise DataError(
                "the texts of algorithm.pretraining.data, its max_text_tokens or run.seed have "
                "changed since the checkpoint was saved; resume with the same, or start a new run"
            )
        self._place, self._offset = int(state["place"]), int(state["offset"])


def pack_texts(mini_batches: Sequence[Sequence[np.ndarray]], *, coef: float) -> PackedBatch:
    """Pack the sequences of each optimizer update, as a batch of their first tokens' responses.

    Every token but a sequence's first has the weight `coef` over their number in its update.

    Args:
        mini_batches: sequences of at least two tokens.
        coef: weight of the mean loss of an update's tokens.
    """
    sequences = [sequence for part in mini_batches for sequence in part]
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    assert len(lengths) and lengths.min() > 1, "one token predicts nothing"
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    predicted = np.ones(cu_seqlens[-1], dtype=np.float32)
    predicted[cu_seqlens[:-1]] = 0.0
    num_predicted = [sum(len(sequence) - 1 for sequence in part) for part in mini_batches]
    sizes = [len(part) for part in mini_batches]
    of_updates = coef / np.repeat(np.array(num_predicted, dtype=np.float64), sizes)
    return PackedBatch(
        tokens=np.concatenate(sequences).astype(np.int64),
        cu_seqlens=cu_seqlens,
        prompt_lengths=np.ones(len(sequences), dtype=np.int64),
        logprobs_rollout=np.full(len(predicted), np.nan, dtype=np.float32),
        advantages=predicted,
        loss_weights=predicted * np.repeat(of_updates, lengths).astype(np.float32),
        policy_versions=np.full(len(predicted), NO_VERSION, dtype=np.int32),
        mini_batches=tuple(np.split(np.arange(len(sequences)), np.cumsum(sizes)[:-1])),
        rewards=np.zeros(len(sequences)),
        group_sizes=np.ones(len(sequences), dtype=np.int64),
    )
