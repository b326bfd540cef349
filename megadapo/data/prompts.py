"""Prompts: load and check them once, without duplicates, and take them in an order that resumes."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import jinja2
from pydantic import Field

from megadapo.data import reasoning_gym
from megadapo.data.config import DataColumns
from megadapo.data.order import Share, WeightedOrder
from megadapo.data.rows import Messages, Row
from megadapo.data.sources import read_rows
from megadapo.errors import DataError
from megadapo.tokens.chat import chat_ids, control_name, prompt_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MAX_TOKEN_CHARACTERS = 1000
"""More characters than a token has on average in any text."""
MAX_LISTED = 5
"""Number of bad rows that one message lists; further ones are counted."""


_Value = TypeVar("_Value")
_IfAny = Annotated[_Value, Field(exclude_if=lambda value: not value)]
"""A field that only reward functions read: its JSON form leaves it out if it is empty."""


@dataclass(frozen=True)
class Prompt:
    """One question with its gold answer."""

    id: str
    """Hash of the row's data_source, messages and gold answer, and of the hidden state if prompts
    of one file differ in nothing else; the same in every run, on every machine, and in a copy of
    the file."""
    messages: Messages
    """(role, content) of each chat message."""
    ground_truth: str
    data_source: str
    extra_info: _IfAny[Mapping[str, Any]] = field(default_factory=dict, hash=False)
    """The row's extra_info as JSON values; empty unless a reward function reads it."""
    further: _IfAny[Mapping[str, Any]] = field(default_factory=dict, hash=False)
    """Other columns of the row that reward functions take, as JSON values."""
    is_text: _IfAny[bool] = False
    """Whether the row's prompt is one text; known if a reward function reads columns."""

    @property
    def state(self) -> str:
        """extra_info and further columns as JSON without `index`, which often counts repeats.

        An item of reasoning-gym has none, because its question says all.
        """
        if self.data_source == reasoning_gym.NAME:
            return ""
        tables = [
            {name: value for name, value in table.items() if name != "index"}
            for table in (self.extra_info, self.further)
            if table
        ]
        return "".join(json.dumps(table, sort_keys=True) for table in tables if table)


def load_prompts(
    source: str,
    *,
    check_gold: Callable[[object, str], str],
    hides_gold: Callable[[str], bool] = lambda _: False,
    columns: DataColumns | None = None,
    with_extra_info: bool = False,
    further: Collection[str] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_prompt_tokens: int | None = None,
    overlong_prompts: Literal["error", "drop"] = "error",
) -> list[Prompt]:
    """Load the prompts of a source in order, and log how many rows were dropped.

    Args:
        source: as in `DataConfig.train`.
        check_gold: returns the gold answer for a data_source, or raises DataError if it cannot be
            scored; for example `rewards.config.RewardConfig.check_gold`.
        hides_gold: whether prompts of a data_source that differ in the gold answer alone are
            different prompts; if not, they are dropped.
        columns: names of the columns and texts around each prompt, as in `read_rows`.
        with_extra_info: read the extra_info column too, if there is one. Prompts with the same
            messages and another `Prompt.state` are then different prompts.
        further: names of other columns to read as `Prompt.further`, or ALL_COLUMNS.
        tokenizer: measures prompts against max_prompt_tokens, if both are given.

    Raises:
        DataError: a row cannot be read or scored, or is too long; the error names file and row.
    """
    found = _Collection(source, check_gold, hides_gold, with_extra_info, further)
    for row in read_rows(source, columns, with_extra_info=with_extra_info, further=further):
        found.add(row)
    agreed = found.finish()
    prompts = agreed
    if tokenizer is not None and max_prompt_tokens is not None:
        prompts = _fitting(agreed, tokenizer, max_prompt_tokens, overlong_prompts)
    if tokenizer is not None:
        _warn_of_controls(source, prompts, tokenizer)
    if not prompts:
        raise DataError(f"{source} has no usable prompt; {found.num_rows} rows were read")
    logger.info(
        "%s: %d prompts of %d rows; left out: %d repeated rows, %d prompts with different gold "
        "answers, %d that are too long",
        *(source, len(prompts), found.num_rows, found.num_duplicates, len(found.conflicts)),
        len(agreed) - len(prompts),
    )
    return prompts


def warn_of_contradictions(prompts: Sequence[Prompt]) -> None:
    """Log a warning if prompts of several sources have different gold answers."""
    golds: dict[tuple[Messages, str], str] = {}
    found = [
        prompt
        for prompt in prompts
        if golds.setdefault((prompt.messages, prompt.state), prompt.ground_truth)
        != prompt.ground_truth
    ]
    if found:
        listed = "\n".join(some([_describe(prompt) for prompt in found]))
        logger.warning(
            "data.train: prompts with another gold answer in another source:\n%s", listed
        )


def _warn_of_controls(
    source: str, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Log a warning if prompts have names of control tokens, as chats in one text have."""
    names = [name for prompt in prompts if (name := control_name(prompt.messages, tokenizer))]
    if names:
        logger.warning(
            "%s: %d prompts have names of control tokens such as %s; these are plain text, and "
            "only a chat template makes tokens of them: give chats as lists of messages",
            *(source, len(names), names[0]),
        )


def render(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int | None = None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Return the token ids of a prompt: by the chat template, or its plain contents without one.

    Names of control tokens in the messages are plain text, as `tokens/chat.py:chat_ids` explains.

    Args:
        tools: JSON schemas of tools that the chat template shows to the model.

    Raises:
        DataError: the prompt is too long, has no tokens, or does not fit the chat template.
    """
    if max_prompt_tokens is not None and (least := _least_tokens(prompt)) > max_prompt_tokens:
        raise DataError(
            f"{_describe(prompt)} has more than {least} tokens; at most {max_prompt_tokens}"
        )
    if tokenizer.chat_template:
        try:
            ids = chat_ids(prompt.messages, tokenizer, tools=tools)
        except jinja2.TemplateError as error:
            raise DataError(
                f"{_describe(prompt)} does not fit the tokenizer's chat template: {error}"
            ) from error
    else:
        ids = prompt_ids("".join(content for _, content in prompt.messages), tokenizer)
    if not ids:
        raise DataError(f"{_describe(prompt)} has no tokens")
    if max_prompt_tokens is not None and len(ids) > max_prompt_tokens:
        raise DataError(
            f"{_describe(prompt)} has {len(ids)} tokens; at most data.max_prompt_tokens = "
            f"{max_prompt_tokens} are allowed"
        )
    return ids


class PromptStream:
    """Endless prompts, epoch after epoch, in an order that depends on the seed alone.

    A prompt index is a position in the stream, counted from 0 over all epochs.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        *,
        shuffle: bool = True,
        shares: Sequence[Share] = (),
    ) -> None:
        """`shares`: the sources of the prompts, in their order; empty: they are one source."""
        if not prompts:
            raise DataError("there are no prompts; check data.train")
        self._prompts = list(prompts)
        shares = shares or (Share("", len(prompts), 1.0),)
        self._order = WeightedOrder(shares, seed, name="prompts", shuffle=shuffle)
        self._state: dict[str, object] = {
            "fingerprint": _fingerprint(p.id for p in prompts),
            "seed": seed,
            "shuffle": shuffle,
        }
        if len(shares) > 1:
            self._state["shares"] = [list(share) for share in shares]

    def __len__(self) -> int:
        """Return the number of positions in which every prompt has come."""
        return self._order.epoch_size

    def at(self, prompt_index: int) -> Prompt:
        """Return the prompt at a position."""
        return self._prompts[self._order.at(prompt_index)]

    def state_dict(self) -> dict[str, object]:
        """Return what identifies the stream, as JSON values."""
        return dict(self._state)

    def difference(self, state: Mapping[str, object]) -> str | None:
        """Return how the stream of a state differs from this one; None if it is the same."""
        for name, problem in (
            ("fingerprint", "the prompts have changed since the checkpoint was saved"),
            ("seed", "the checkpoint was saved with another seed"),
            ("shuffle", "the checkpoint was saved with another data.shuffle"),
            ("shares", "the checkpoint was saved with other sources or weights in data.train"),
        ):
            there, here = state.get(name), self._state.get(name)
            if there != here:
                return f"{problem} ({name} {there!r} there, {here!r} here)"
        return None


def _fingerprint(ids: Iterable[str]) -> str:
    return hashlib.sha256("".join(ids).encode()).hexdigest()


_Key = tuple[Messages, str, str, str]
"""Messages, state, data_source and hidden gold answer, by which a prompt is known."""


class _Collection:
    """The distinct prompts of a source, collected row by row, with the problems of other rows."""

    def __init__(
        self,
        source: str,
        check_gold: Callable[[object, str], str],
        hides_gold: Callable[[str], bool],
        with_extra_info: bool,
        further: Collection[str],
    ) -> None:
        self.num_rows = 0
        self.num_duplicates = 0
        """Rows that repeat a prompt and its gold (DAPO-Math-17k has each about 100 times)."""
        self.conflicts: dict[_Key, str] = {}
        """Contradictory golds of the prompts."""
        self._source = source
        self._check_gold, self._hides_gold = check_gold, hides_gold
        self._with_extra_info, self._further = with_extra_info, further
        self._prompts: dict[_Key, Prompt] = {}
        self._bad_golds: list[str] = []

    def add(self, row: Row) -> None:
        """Keep the prompt of a row if it is new."""
        self.num_rows += 1
        messages, gold = row.messages, row.ground_truth
        # the whole id follows when all prompts are known
        prompt = Prompt(row.own_source, messages, "", row.data_source)
        if self._with_extra_info:
            further = row.further(self._further)
            prompt = replace(
                prompt, extra_info=row.extra_info, further=further, is_text=row.is_text
            )
        hidden = str(gold) if self._hides_gold(prompt.data_source) else ""
        key = (messages, prompt.state, prompt.data_source, hidden)
        known = self._prompts.get(key)
        if known is None:
            self._prompts[key] = replace(prompt, ground_truth=self._checked(row, gold))
        elif known.ground_truth == gold:
            self.num_duplicates += 1
        else:
            both = f"{row.place}: {gold!r:.80}, and before {known.ground_truth!r:.80}"
            self.conflicts.setdefault(key, both)

    def finish(self) -> list[Prompt]:
        """Return the prompts whose rows agree, in order; raise DataError if a gold is unusable."""
        if self._bad_golds:
            raise DataError("\n".join(some(self._bad_golds)))
        if self.conflicts:
            # Two golds for one prompt would reward contradictory answers.
            listed = "\n".join(some(list(self.conflicts.values())))
            logger.warning("%s: prompts with two gold answers dropped:\n%s", self._source, listed)
        num_states = Counter(messages for messages, _ in {key[:2] for key in self._prompts})
        return [
            replace(
                prompt,
                id=_prompt_id(prompt, prompt.id, has_state=num_states[prompt.messages] > 1),
            )
            for key, prompt in self._prompts.items()
            if key not in self.conflicts
        ]

    def _checked(self, row: Row, gold: object) -> str:
        try:
            return self._check_gold(gold, row.data_source)
        except DataError as error:
            self._bad_golds.append(f"{row.place}: {error}")
            return str(gold)


def _prompt_id(prompt: Prompt, source: str, *, has_state: bool) -> str:
    parts = [source, prompt.messages, prompt.ground_truth]
    key = json.dumps([*parts, prompt.state] if has_state else parts)
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _fitting(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    overlong_prompts: Literal["error", "drop"],
) -> list[Prompt]:
    lengths = [
        # nothing that long is encoded, which could take minutes
        least
        if (least := _least_tokens(prompt)) > max_prompt_tokens
        else len(render(prompt, tokenizer))
        for prompt in prompts
    ]
    too_long = [
        f"{_describe(prompt)} has {length} tokens; at most {max_prompt_tokens} are allowed"
        for prompt, length in zip(prompts, lengths, strict=True)
        if length > max_prompt_tokens
    ]
    if too_long and overlong_prompts == "error":
        advice = 'Raise data.max_prompt_tokens, or set data.overlong_prompts = "drop"'
        raise DataError("\n".join([*some(too_long), advice]))
    return [p for p, n in zip(prompts, lengths, strict=True) if n <= max_prompt_tokens]


def _least_tokens(prompt: Prompt) -> int:
    """Return a number of tokens that a prompt has at least."""
    return sum(len(content) for _, content in prompt.messages) // MAX_TOKEN_CHARACTERS


def _describe(prompt: Prompt) -> str:
    return f"prompt {prompt.id} ({prompt.messages[-1][1]!r:.60})"


def some(lines: list[str]) -> list[str]:
    """Return the first lines, and a line that counts the others."""
    rest = len(lines) - MAX_LISTED
    return lines[:MAX_LISTED] + ([f"... and {rest} more"] if rest > 0 else [])
