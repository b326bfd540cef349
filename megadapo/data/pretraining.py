"""Pretraining data: texts for a language-model loss, split into sequences in a resumable order."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megadapo.data.batch import PackedBatch
from megadapo.data.group import NO_VERSION
from megadapo.data.order import EpochOrder
from megadapo.data.sources import read_text_rows
from megadapo.errors import DataError

LabelledTokens = tuple[np.ndarray, np.ndarray]
"""Tokens [n] of a sequence, and whether each is predicted, [n] bool."""


def read_texts(source: str) -> list[str]:
    """Return the texts of a source of `read_text_rows` in order, without empty ones.

    Raises:
        DataError: a row cannot be read; the error names file and row.
    """
    texts = [text for row in read_text_rows(source) if (text := row.text)]
    if not texts:
        raise DataError(f"{source} has no text")
    return texts


class PretrainingStream:
    """Endless token sequences from texts, in an order that depends on a seed alone.

    A text ends with the end-of-sequence token. A long text gives several sequences; each begins
    with the last token of the one before, so every token but the first is predicted once.
    """

    def __init__(
        self,
        texts: Sequence[str],
        encode: Callable[[str], list[int]],
        *,
        seed: int,
        max_tokens: int,
    ) -> None:
        """Start at the first text.

        Args:
            encode: returns the tokens of a text, with the end-of-sequence token.
            max_tokens: length of the longest sequence.
        """
        assert max_tokens > 1, "one token predicts nothing"
        self._texts = texts
        self._encode = encode
        self._order = EpochOrder(len(texts), seed, name="texts")
        self._max_tokens = max_tokens
        digest = hashlib.sha256(f"{seed}/{max_tokens}".encode())
        for text in texts:
            # the length separates texts, so that different lists differ
            digest.update(f"/{len(text)}/".encode() + text.encode())
        self._fingerprint = digest.hexdigest()
        self._place, self._offset = 0, 0
        """Index of the next text, and the token at which its next sequence begins."""

    def take(self, num_tokens: int) -> list[np.ndarray]:
        """Return the next sequences, each [n] int64, with at most `num_tokens` tokens in all.

        Raises:
            DataError: every text is shorter than two tokens.
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
        """Return the position as JSON values."""
        return {"fingerprint": self._fingerprint, "place": self._place, "offset": self._offset}

    def difference(self, state: Mapping[str, Any]) -> str | None:
        """Return how the stream of a state differs from this one; None if it is the same."""
        if state.get("fingerprint") == self._fingerprint:
            return None
        return (
            "the texts of algorithm.pretraining.data, its max_text_tokens or run.seed have changed "
            "since the checkpoint was saved"
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position that `state_dict` of the same stream returned."""
        self._place, self._offset = int(state["place"]), int(state["offset"])


def pack_pretraining(mini_batches: Sequence[Sequence[np.ndarray]], *, coef: float) -> PackedBatch:
    """Pack the sequences of each optimizer update; a sequence's first token is its prompt.

    Every other token has the weight `coef` divided by the number of such tokens in its update.

    Args:
        mini_batches: sequences of at least two tokens.
        coef: weight of the mean loss of an update's tokens.
    """
    return pack_likelihood(
        [[(tokens, np.arange(len(tokens)) > 0) for tokens in part] for part in mini_batches],
        coef=coef,
    )


def pack_likelihood(
    mini_batches: Sequence[Sequence[LabelledTokens]], *, coef: float = 1.0
) -> PackedBatch:
    """Pack the sequences of each optimizer update, for the loss of a language model.

    Each predicted token has the weight `coef` divided by their number in its update.

    Args:
        mini_batches: tokens of each sequence, with True for those to predict, but the first.
        coef: weight of the mean loss of an update's predicted tokens.
    """
    sequences = [sequence for part in mini_batches for sequence in part]
    lengths = np.array([len(tokens) for tokens, _ in sequences], dtype=np.int64)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    prompt_lengths = np.array([wanted.argmax() for _, wanted in sequences], dtype=np.int64)
    assert len(lengths) and prompt_lengths.min() > 0, "one token predicts nothing"
    predicted = np.concatenate([wanted for _, wanted in sequences]).astype(np.float32)
    num_predicted = [sum(int(wanted.sum()) for _, wanted in part) for part in mini_batches]
    sizes = [len(part) for part in mini_batches]
    token_weights = coef / np.repeat(np.array(num_predicted, dtype=np.float64), sizes)
    return PackedBatch(
        tokens=np.concatenate([tokens for tokens, _ in sequences]).astype(np.int64),
        cu_seqlens=cu_seqlens,
        prompt_lengths=prompt_lengths,
        logprobs_rollout=np.full(len(predicted), np.nan, dtype=np.float32),
        advantages=predicted,
        loss_weights=predicted * np.repeat(token_weights, lengths).astype(np.float32),
        policy_versions=np.full(len(predicted), NO_VERSION, dtype=np.int32),
        mini_batches=tuple(np.split(np.arange(len(sequences)), np.cumsum(sizes)[:-1])),
        rewards=np.zeros(len(sequences)),
        group_sizes=np.ones(len(sequences), dtype=np.int64),
    )
