"""Prompts: loaded once, checked and without duplicates, and taken in an order that can resume."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import jinja2

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

    def to_json(self) -> dict[str, Any]:
        """Return the prompt as JSON values."""
        return {**asdict(self), "messages": [list(message) for message in self.messages]}

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
    check_gold: Callable[[object], str],
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_prompt_tokens: int | None = None,
    overlong_prompts: Literal["error", "drop"] = "error",
) -> list[Prompt]:
    """Load the prompts of a source in its order, and log how many were dropped and why.

    Args:
        source: a parquet or JSONL file or a folder of them, a Hub dataset
            ORG/NAME[@REVISION][/PATH], or a built-in task: arithmetic:SPLIT:NUM[:SEED] or
            arithmetic-chain:SPLIT:NUM[:SEED].
        check_gold: returns a gold that can be scored, or raises DataError saying why it cannot;
            `rewards.dapo_math.validate_ground_truth` for the rule of the run.
        tokenizer: together with max_prompt_tokens, measures every prompt as `render` makes it.

    Raises:
        DataError: names the file and row of whatever cannot be read, scored or fitted.
    """
    prompts, counts = read_prompts(
        source,
        check_gold=check_gold,
        tokenizer=tokenizer,
        max_prompt_tokens=max_prompt_tokens,
        overlong_prompts=overlong_prompts,
    )
    logger.info("%s: %d prompts; %s", source, len(prompts), counts)
    return prompts


def read_prompts(
    source: str,
    *,
    check_gold: Callable[[object], str],
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_prompt_tokens: int | None = None,
    overlong_prompts: Literal["error", "drop"] = "error",
) -> tuple[list[Prompt], LoadCounts]:
    """Do what `load_prompts` does, and return the counts instead of logging them."""
    found = _Collection(source, check_gold)
    for row in read_rows(source):
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
    """Endless prompts in an order that depends on the seed alone, epoch after epoch."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, *, shuffle: bool = True) -> None:
        if not prompts:
            raise DataError("there are no prompts to take")
        self._prompts = list(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = hashlib.sha256("".join(p.id for p in prompts).encode()).hexdigest()
        self._start(epoch=0, position=0)

    def _start(self, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._position = position
        self._order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(f"prompts/{self._seed}/{epoch}").shuffle(self._order)

    @property
    def epoch(self) -> int:
        """Number of times that every prompt has been taken."""
        return self._epoch

    def next(self, num_prompts: int) -> list[Prompt]:
        """Take the next prompts; a new epoch starts as soon as one is used up."""
        taken: list[Prompt] = []
        while len(taken) < num_prompts:
            stop = self._position + num_prompts - len(taken)
            taken += [self._prompts[i] for i in self._order[self._position : stop]]
            if stop < len(self._order):
                self._position = stop
            else:
                self._start(self._epoch + 1, 0)
        return taken

    def state_dict(self) -> dict[str, object]:
        """Return the place in the stream, as JSON can hold it."""
        return {
            "fingerprint": self._fingerprint,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "position": self._position,
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            DataError: the state belongs to other prompts or another order, or is damaged.
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
        epoch, position = state.get("epoch"), state.get("position")
        if type(epoch) is not int or type(position) is not int:
            raise DataError(f"the saved place in the prompts is damaged: {state}")
        if epoch < 0 or not 0 <= position < len(self._prompts):
            raise DataError(f"the saved place in the prompts is out of range: {state}")
        self._start(epoch, position)


class _Collection:
    """The different prompts among the rows of a source, and what is wrong with the others."""

    def __init__(self, source: str, check_gold: Callable[[object], str]) -> None:
        self.num_rows = 0
        self.num_duplicates = 0
        self.conflicts: dict[Messages, str] = {}
        self._source = source
        self._check_gold = check_gold
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
            checked = self._check_gold(gold)
        except DataError as error:
            self._bad_golds.append(f"{row.place}: {error}")
            checked = str(gold)
        key = json.dumps([row.data_source, messages, checked])
        prompt_id = hashlib.sha256(key.encode()).hexdigest()[:16]
        self._prompts[messages] = Prompt(prompt_id, messages, checked, row.data_source)


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
