"""Preference pairs: two answers to one prompt, the chosen and the rejected one."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jinja2
import numpy as np

from megadapo.data.batch import PackedBatch
from megadapo.data.config import DataColumns
from megadapo.data.group import NO_VERSION, Group
from megadapo.data.rows import Messages
from megadapo.data.sources import read_pair_rows
from megadapo.errors import DataError
from megadapo.tokens.chat import chat_ids, prompt_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Pair:
    """Tokens of two conversations that differ in their answer."""

    chosen: np.ndarray  # [n] int32
    rejected: np.ndarray  # [m] int32


def load_pairs(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    columns: DataColumns | None = None,
    overlong: Literal["error", "drop"] = "error",
) -> list[Pair]:
    """Return the pairs of a source of `read_pair_rows` in order.

    Args:
        max_tokens: most tokens of a conversation.
        columns: texts that each prompt must have around it, as in a run with rollouts.
        overlong: whether a longer one is an error, or its pair is left out.

    Raises:
        DataError: a row cannot be read, has equal answers or is too long; the error names it.
    """
    pairs: list[Pair] = []
    for row in read_pair_rows(source, columns):
        conversations = [row.preference("chosen"), row.preference("rejected")]
        for messages in conversations:
            row.names.check_texts(messages, row.place)
        chosen, rejected = (
            np.array(conversation_tokens(messages, tokenizer), dtype=np.int32)
            for messages in conversations
        )
        if np.array_equal(chosen, rejected):
            raise DataError(f"{row.place}: chosen and rejected are the same text")
        longest = max(len(chosen), len(rejected))
        if longest <= max_tokens:
            pairs.append(Pair(chosen, rejected))
        elif overlong == "error":
            raise DataError(f"{row.place} has {longest} tokens; at most {max_tokens} are allowed")
    if not pairs:
        raise DataError(f"{source} has no usable pair")
    return pairs


def conversation_tokens(messages: Messages, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a conversation that ends with an answer, as a reward model reads them.

    The chat template makes them, as on a server; without one they are the contents and the
    end-of-sequence token.

    Raises:
        DataError: the conversation has no tokens, or does not fit the chat template.
    """
    if tokenizer.chat_template:
        try:
            ids = chat_ids(messages, tokenizer, add_generation_prompt=False)
        except jinja2.TemplateError as error:
            raise DataError(f"{messages!r:.80} does not fit the chat template: {error}") from error
    else:
        text = "".join(content for _, content in messages)
        # the texts of some files have the end already
        ids = prompt_ids(text.removesuffix(str(tokenizer.eos_token or "")), tokenizer)
        end = tokenizer.eos_token_id
        ids = ids if end is None else [*ids, end]
    if not ids:
        raise DataError(f"{messages!r:.80} has no tokens")
    return ids


def pack_pairs(mini_batches: Sequence[Sequence[Pair]]) -> PackedBatch:
    """Pack the pairs of each optimizer update: sequence 2i is chosen, 2i + 1 rejected.

    A reward model gives its score at a sequence's last token. Entries of a batch describe the token
    that a hidden state predicts, so one more token is added to each sequence. No token before it
    attends to it.
    """
    pairs = [pair for part in mini_batches for pair in part]
    sequences = [tokens for pair in pairs for tokens in (pair.chosen, pair.rejected)]
    lengths = np.array([len(tokens) + 1 for tokens in sequences], dtype=np.int64)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    num_tokens = int(cu_seqlens[-1])
    scored = np.zeros(num_tokens, dtype=np.float32)
    scored[cu_seqlens[1:] - 1] = 1.0
    sizes = [2 * len(part) for part in mini_batches]
    return PackedBatch(
        tokens=np.concatenate([np.append(tokens, tokens[-1]) for tokens in sequences]).astype(
            np.int64
        ),
        cu_seqlens=cu_seqlens,
        prompt_lengths=lengths - 1,
        logprobs_rollout=np.full(num_tokens, np.nan, dtype=np.float32),
        advantages=np.zeros(num_tokens, dtype=np.float32),
        loss_weights=scored,
        policy_versions=np.full(num_tokens, NO_VERSION, dtype=np.int32),
        mini_batches=tuple(np.split(np.arange(len(sequences)), np.cumsum(sizes)[:-1])),
        rewards=np.zeros(len(sequences)),
        group_sizes=np.full(len(pairs), 2, dtype=np.int64),
    )


def fingerprint(pairs: Sequence[Pair]) -> str:
    """Return a hash of the pairs' tokens."""
    digest = hashlib.sha256()
    for pair in pairs:
        # the length separates conversations, so that different lists differ
        for tokens in (pair.chosen, pair.rejected):
            digest.update(f"/{len(tokens)}/".encode() + tokens.tobytes())
    return digest.hexdigest()


class PairRows:
    """The rows of pairs from sampled groups, which `load_pairs` reads."""

    def __init__(self, path: Path, *, max_per_prompt: int | None = None) -> None:
        """Begin an empty file.

        `max_per_prompt`: number of pairs of one prompt to write; None writes all.
        """
        self.path = path
        self.num_rows = 0
        self._max_per_prompt = max_per_prompt
        self._num_of: Counter[str] = Counter()
        self._texts: defaultdict[str, set[str]] = defaultdict(set)
        path.write_text("")

    def add(self, groups: Iterable[Group]) -> None:
        """Write the pairs of groups that have a correct and an incorrect response."""
        rows = [row for group in groups for row in self._rows(group)]
        self.num_rows += len(rows)
        with self.path.open("a", encoding="utf-8") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in rows)

    @property
    def summary(self) -> str:
        """One line about the rows."""
        num_prompts = sum(map(bool, self._num_of.values()))
        return f"{self.num_rows} pairs of responses to {num_prompts} prompts"

    def _rows(self, group: Group) -> Iterator[dict[str, Any]]:
        """Yield pairs of different texts; each text of a prompt is in one pair at most."""
        prompt, known = group.prompt, self._texts[group.prompt.id]
        new: dict[bool, dict[str, None]] = {True: {}, False: {}}
        for response, is_correct in zip(group.responses, group.need_correct(), strict=True):
            if response.text not in known:
                new[is_correct][response.text] = None
        for chosen, rejected in zip(new[True], new[False], strict=False):
            if self._num_of[prompt.id] == self._max_per_prompt:
                return
            self._num_of[prompt.id] += 1
            known.update((chosen, rejected))
            messages = [{"role": role, "content": content} for role, content in prompt.messages]
            yield {
                "prompt": messages,
                "chosen": chosen,
                "rejected": rejected,
                "prompt_id": prompt.id,
            }
