"""Prompts: loaded once, checked and without duplicates, and taken in an order that can resume."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import jinja2

from megadapo.data.order import EpochOrder
from megadapo.data.sources import Messages, Row, read_rows
from megadapo.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MAX_LISTED = 5
"""Bad rows that one message lists; the rest are counted."""


@dataclass(frozen=True)
class Prompt:
    """One question with its gold answer."""

    id: str
    """Hash of source, messages and gold: the same in every run and on every machine."""
    messages: Messages
    """(role, content) of each chat message."""
    ground_truth: str
    data_source: str
    extra_info: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What else the row says, as JSON values; empty unless a reward function is given it."""

    def to_json(self) -> dict[str, Any]:
        """Return the prompt as JSON values, what is empty left out."""
        entry = {**asdict(self), "messages": [list(message) for message in self.messages]}
        return {name: value for name, value in entry.items() if name != "extra_info" or value}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        """Return the prompt that `to_json` was called on."""
        messages = tuple((role, content) for role, content in entry["messages"])
        return cls(**{**entry, "messages": messages})


@dataclass(frozen=True)
class LoadCounts:
    """What became of the rows of a source."""

    num_rows: int
    num_duplicates: int
    """Rows whose prompt and gold had been seen before (DAPO-Math-17k has each about 100 times)."""
    num_conflicting: int
    """Prompts dropped because their rows do not agree on the gold answer."""
    num_overlong: int
    """Prompts dropped because of their length."""


def load_prompts(
    source: str,
    *,
    check_gold: Callable[[object, str], str],
    with_extra_info: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_prompt_tokens: int | None = None,
    overlong_prompts: Literal["error", "drop"] = "error",
) -> list[Prompt]:
    """Load the prompts of a source in its order, and log how many were dropped and why.

    Args:
        source: a parquet or JSONL file or a folder of them, a Hub dataset
            ORG/NAME[@REVISION][/PATH], or a built-in task: arithmetic:SPLIT:NUM[:SEED] or
            arithmetic-chain:SPLIT:NUM[:SEED].
        check_gold: returns the gold of a prompt from a data_source if it can be scored, or raises
            DataError saying why it cannot; `rewards.config.RewardConfig.check_gold` is one.
        with_extra_info: read the column of that name too, where there is one.
        tokenizer: together with max_prompt_tokens, measures every prompt as `render` makes it.

    Raises:
        DataError: names the file and row of whatever cannot be read, scored or fitted.
    """
    prompts, counts = read_prompts(
        source,
        check_gold=check_gold,
        with_extra_info=with_extra_info,
        tokenizer=tokenizer,
        max_prompt_tokens=max_prompt_tokens,
        overlong_prompts=overlong_prompts,
    )
    logger.info("%s: %d prompts; %s", source, len(prompts), counts)
    return prompts


def read_prompts(
    source: str,
    *,
    check_gold: Callable[[object, str], str],
    with_extra_info: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_prompt_tokens: int | None = None,
    overlong_prompts: Literal["error", "drop"] = "error",
) -> tuple[list[Prompt], LoadCounts]:
    """Do what `load_prompts` does, and return the counts instead of logging them."""
    found = _Collection(source, check_gold, with_extra_info)
    for row in read_rows(source, with_extra_info=with_extra_info):
        found.add(row)
    agreed = found.finish()
    prompts = agreed
    if tokenizer is not None and max_prompt_tokens is not None:
        prompts = _fitting(agreed, tokenizer, max_prompt_tokens, overlong_prompts)
    if not prompts:
        raise DataError(
            f"{source} holds no prompt that can be used; {found.num_rows} rows were read"
        )
    return prompts, LoadCounts(
        num_rows=found.num_rows,
        num_duplicates=found.num_duplicates,
        num_conflicting=len(found.conflicts),
        num_overlong=len(agreed) - len(prompts),
    )


def render(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int | None = None
) -> list[int]:
    """Return the token ids the model is given: the chat template's, or the plain contents'.

    Raises:
        DataError: the prompt is longer than the limit, has no tokens at all, or does not suit
            the chat template.
    """
    if tokenizer.chat_template:
        ids = _apply_chat_template(prompt, tokenizer)
    else:
        ids = tokenizer.encode("".join(content for _, content in prompt.messages))
    if not ids:
        raise DataError(f"{_describe(prompt)} has no tokens")
    if max_prompt_tokens is not None and len(ids) > max_prompt_tokens:
        raise DataError(f"{_describe(prompt)} has {len(ids)} tokens; at most {max_prompt_tokens}")
    return ids


class PromptStream:
    """Endless prompts in an order that depends on the seed alone, epoch after epoch.

    A prompt's place in the stream, counted from 0 over all epochs, is the order it is asked in.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, *, shuffle: bool = True) -> None:
        if not prompts:
            raise DataError("there are no prompts to take")
        self._prompts = list(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self._order = EpochOrder(len(prompts), seed, name="prompts", shuffle=shuffle)
        self._fingerprint = hashlib.sha256("".join(p.id for p in prompts).encode()).hexdigest()

    def __len__(self) -> int:
        """Prompts of an epoch."""
        return len(self._prompts)

    def epoch(self, order: int) -> int:
        """Number of times that every prompt comes before this place."""
        return order // len(self._prompts)

    def at(self, order: int) -> Prompt:
        """The prompt at this place."""
        return self._prompts[self._order.at(order)]

    def state_dict(self) -> dict[str, object]:
        """Return what names the stream, as JSON can hold it."""
        return {"fingerprint": self._fingerprint, "seed": self._seed, "shuffle": self._shuffle}

    def check_state(self, state: Mapping[str, object]) -> None:
        """Refuse a state of another stream.

        Raises:
            DataError: the state belongs to other prompts or another order.
        """
        for name, what in (
            ("fingerprint", "the prompts have changed since the checkpoint was saved"),
            ("seed", "the checkpoint was saved with another seed"),
            ("shuffle", "the checkpoint was saved with another data.shuffle"),
        ):
            if state.get(name) != self.state_dict()[name]:
                raise DataError(
                    f"{what} ({name} {state.get(name)!r} there, {self.state_dict()[name]!r} "
                    "here); resume with the same data, or start a new run"
                )


class _Collection:
    """The different prompts among the rows of a source, and what is wrong with the others."""

    def __init__(
        self, source: str, check_gold: Callable[[object, str], str], with_extra_info: bool
    ) -> None:
        self.num_rows = 0
        self.num_duplicates = 0
        self.conflicts: dict[Messages, str] = {}
        self._source = source
        self._check_gold = check_gold
        self._with_extra_info = with_extra_info
        self._prompts: dict[Messages, Prompt] = {}
        self._bad_golds: list[str] = []

    def add(self, row: Row) -> None:
        """Keep the prompt of a row if it is new."""
        self.num_rows += 1
        messages, gold = row.messages, row.ground_truth
        known = self._prompts.get(messages)
        if known is None:
            self._add_new(row, messages, gold)
        elif known.ground_truth == gold:
            self.num_duplicates += 1
        else:
            both = f"{row.place}: {gold!r:.80}, and before {known.ground_truth!r:.80}"
            self.conflicts.setdefault(messages, both)

    def finish(self) -> list[Prompt]:
        """Return the prompts whose rows agree, in their order; raise if a gold cannot be scored."""
        if self._bad_golds:
            raise DataError("\n".join(_some(self._bad_golds)))
        if self.conflicts:
            # Rewarding one answer in one epoch and another in the next teaches nothing.
            listed = "\n".join(_some(list(self.conflicts.values())))
            logger.warning("%s: prompts with two gold answers dropped:\n%s", self._source, listed)
        return [
            prompt for prompt in self._prompts.values() if prompt.messages not in self.conflicts
        ]

    def _add_new(self, row: Row, messages: Messages, gold: object) -> None:
        try:
            checked = self._check_gold(gold, row.data_source)
        except DataError as error:
            self._bad_golds.append(f"{row.place}: {error}")
            checked = str(gold)
        key = json.dumps([row.data_source, messages, checked])
        prompt_id = hashlib.sha256(key.encode()).hexdigest()[:16]
        extra_info = row.extra_info if self._with_extra_info else {}
        prompt = Prompt(prompt_id, messages, checked, row.data_source, extra_info)
        self._prompts[messages] = prompt


def _apply_chat_template(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    chat = [{"role": role, "content": content} for role, content in prompt.messages]
    try:
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    except jinja2.TemplateError as error:
        raise DataError(
            f"{_describe(prompt)} does not suit the tokenizer's chat template: {error}"
        ) from error
    # of one chat, neither as text nor with an attention mask
    return cast(list[int], ids)


def _fitting(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    overlong_prompts: Literal["error", "drop"],
) -> list[Prompt]:
    lengths = [len(render(prompt, tokenizer)) for prompt in prompts]
    too_long = [
        f"{_describe(prompt)} has {length} tokens; at most {max_prompt_tokens} are allowed"
        for prompt, length in zip(prompts, lengths, strict=True)
        if length > max_prompt_tokens
    ]
    if too_long and overlong_prompts == "error":
        advice = 'Raise data.max_prompt_tokens, or set data.overlong_prompts = "drop"'
        raise DataError("\n".join([*_some(too_long), advice]))
    return [p for p, n in zip(prompts, lengths, strict=True) if n <= max_prompt_tokens]


def _describe(prompt: Prompt) -> str:
    return f"prompt {prompt.id} ({prompt.messages[-1][1]!r:.60})"


def _some(lines: list[str]) -> list[str]:
    rest = len(lines) - MAX_LISTED
    return lines[:MAX_LISTED] + ([f"... and {rest} more"] if rest > 0 else [])
