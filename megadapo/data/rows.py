"""Rows of files: their columns as prompts, gold answers, conversations and texts, checked.

A row knows its file and line, so that errors can name them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from megadapo.data.config import PROMPT_MARK, DataColumns
from megadapo.data.patterns import last_match
from megadapo.errors import DataError

PROMPTS = ("prompt", "question", "problem", "messages")
"""Usual columns of a prompt; of several the first counts."""
GOLDS = ("reward_model.ground_truth", "ground_truth", "answer", "solution")
"""Usual columns of a gold answer; of several the first counts, which is verl's."""
ANSWERS = ("response", "answer")
"""Columns of the text that answers a prompt, one of them."""
PROMPT_ID = "prompt_id"
"""The column that the rows of `megadapo rollout` have."""
OF_ROLLOUTS = ("tools", "response_ids", "environment_spans", PROMPT_ID)
"""Columns of sampled answers: schemas in the prompt, tokens, and which of these were given."""
EXTRA_INFO = "extra_info"
"""The column with further facts about a prompt; few readers need it."""
DATA_SOURCE = "data_source"
ALL_COLUMNS = "*"
"""Stands for all columns of a row but those of the prompt, data_source and extra_info."""
TEXT = "text"
"""The only column that pretraining data needs."""
_OF_ANSWERS = ("assistant", "tool")
"""Roles of a message that begins an answer and no prompt."""
_UNREAD = ("tool_calls", "function_call", "reasoning_content", "reasoning")
"""Keys of a chat message that hold a part of its text for some chat templates."""
_MISSING = object()

Messages = tuple[tuple[str, str], ...]
"""(role, content) of each chat message."""


@dataclass(frozen=True)
class Names:
    """Columns of one file's prompts, and the texts around each of them."""

    prompt: str = "prompt"
    ground_truth: str = "reward_model.ground_truth"
    pattern: str = ""
    """Pattern that finds the answer in a gold text; empty: the whole text is the answer."""
    origin: str = ""
    """data_source of rows without such a column."""
    config: DataColumns = DataColumns()
    examples: Messages = ()
    """Turns before each prompt."""

    def wrap(self, messages: Messages, place: str) -> Messages:
        """Return a prompt's messages with the template, examples and system prompt around them."""
        config = self.config
        if config.template is not None:
            users = [number for number, (role, _) in enumerate(messages) if role == "user"]
            if not users:
                raise DataError(f"{place}: data.columns.template needs a message of the user")
            last = users[-1]
            text = config.template.replace(PROMPT_MARK, messages[last][1])
            messages = (*messages[:last], ("user", text), *messages[last + 1 :])
        head = messages[:1] if messages[0][0] == "system" else ()
        rest = messages[len(head) :]
        if config.system is not None:
            if head:
                raise DataError(
                    f"{place}: the prompt has a system message; leave out data.columns.system"
                )
            head = (("system", config.system),)
        return (*head, *self.examples, *rest)

    def check_texts(self, messages: Messages, place: str) -> None:
        """Raise DataError if an answered conversation lacks the texts that `wrap` puts around.

        Chats with answers are taken as they are. Those of rollouts have the texts already.
        """
        config = self.config
        head = messages[:1] if messages[0][0] == "system" else ()
        begin, _, _ = (config.template or "").partition(PROMPT_MARK)
        _, _, end = (config.template or "").rpartition(PROMPT_MARK)
        last = [content for role, content in messages if role == "user"][-1:]
        has = {
            "system": config.system is None or head == (("system", config.system),),
            "template": config.template is None
            or any(text.startswith(begin) and text.endswith(end) for text in last),
            "examples": messages[len(head) :][: len(self.examples)] == self.examples,
        }
        missing = [f"data.columns.{key}" for key, found in has.items() if not found]
        if missing:
            raise DataError(
                f"{place}: chats with answers are taken as they are, and this one lacks the text "
                f"of {', '.join(missing)}: add it to the rows, or leave the key out"
            )


@dataclass(frozen=True)
class Row:
    """One unchecked row of a source."""

    place: str
    """File and row (parquet, from 0) or line (JSONL, from 1), for error messages."""
    columns: Mapping[str, object]
    names: Names = Names()

    @property
    def messages(self) -> Messages:
        """Chat messages of the prompt, checked; a text is one message of the user."""
        prompt = self._prompt(self.names.prompt)
        if prompt[-1][0] == "assistant":
            raise DataError(
                f"{self.place}: {self.names.prompt} ends with a message of the assistant, which "
                "would show the answer; leave it out"
            )
        return self.names.wrap(prompt, self.place)

    def preference(self, answer: Literal["chosen", "rejected"]) -> Messages:
        """Return the messages of a preference pair's prompt and of one of its answers, checked.

        The prompt may be one text, or be part of both answers. Such answers are whole: a `prompt`
        beside them must be their beginning, and `messages` is ignored.
        """
        if isinstance(self.columns.get(answer), list):
            chat = self._chat(answer)
            if chat[0][0] not in _OF_ANSWERS:
                if self.columns.get("prompt") is not None:
                    self._check_beginning(answer, chat, self._prompt("prompt"))
                return chat
        prompt: Messages = ()
        for column in ("prompt", "messages"):
            if self.columns.get(column) is not None:
                prompt = self._prompt(column)
                break
        if isinstance(self.columns.get(answer), list):
            return prompt + self._chat(answer)
        if not prompt:
            raise DataError(f"{self.place}: a pair needs a prompt, or answers that are chats")
        return (*prompt, ("assistant", self._text(answer)))

    def _check_beginning(self, answer: str, chat: Messages, prompt: Messages) -> None:
        has_system = chat[0][0] == "system" and prompt[0][0] != "system"
        if chat[has_system:][: len(prompt)] != prompt:
            raise DataError(
                f"{self.place}: {answer} is a whole chat, and does not begin with the row's "
                "prompt; leave out prompt, or the messages before the answer"
            )

    @property
    def conversation(self) -> Messages:
        """Messages of an answered conversation, checked.

        They are `messages` as they are, or a prompt as in a run with rollouts, followed by the text
        in `response` or `answer`.
        """
        named = self.names.config.prompt
        # the rows of rollouts have messages, whatever column the prompts came from
        is_chat = named is None or (self._value(named) is _MISSING and self.is_sampled)
        if is_chat and self.columns.get("messages") is not None:
            return self._chat("messages")
        prompts = PROMPTS if named is None else (named,)
        filled = [name for name in prompts if self.has(name)]
        answers = [name for name in ANSWERS if self.columns.get(name) is not None]
        if not filled or len(answers) != 1:
            raise DataError(
                f"{self.place}: expected messages, or {named or 'prompt'} with either response or "
                f"answer; found {', '.join(self.columns) or 'nothing'}"
            )
        prompt = self.names.wrap(self._prompt(filled[0]), self.place)
        return (*prompt, ("assistant", self._text(answers[0])))

    @property
    def is_sampled(self) -> bool:
        """Whether `megadapo rollout` wrote the row."""
        return self.columns.get(PROMPT_ID) is not None

    @property
    def given_answers(self) -> set[int]:
        """Places in `conversation` of answers that are not to be learned.

        They are those of data.columns.examples, and messages with weight 0.
        """
        messages = self.conversation
        first = int(messages[0][0] == "system")
        examples = self.names.examples
        has_examples = messages[first : first + len(examples)] == examples
        given = set(range(first, first + len(examples))) if has_examples else set()
        chat = self.columns.get("messages")
        if isinstance(chat, list) and len(chat) == len(messages):
            given |= {place for place, one in enumerate(chat) if one.get("weight") == 0}
        return given

    @property
    def tools(self) -> list[dict[str, Any]]:
        """JSON schemas of the tools that the chat template shows, as a list or its JSON text."""
        tools = self.columns.get("tools")
        if isinstance(tools, str):
            try:
                tools = json.loads(tools)
            except ValueError as error:
                raise DataError(f"{self.place}: tools is not JSON: {error}") from error
        if tools is None:
            return []
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise DataError(f"{self.place}: tools is not a list of JSON schemas: {tools!r:.80}")
        return tools

    @property
    def text(self) -> str:
        """Text for a language-model loss, checked; it may be empty."""
        return self._text(TEXT)

    @property
    def ground_truth(self) -> object:
        """Gold answer of the row; nothing here checks that it can be scored."""
        name, pattern = self.names.ground_truth, self.names.pattern
        gold = self._value(name)
        if gold is _MISSING:
            raise DataError(f"{self.place}: {name} is missing")
        if type(gold) is float and math.isfinite(gold):
            # repr writes 1e-05, which no response does
            return str(int(gold)) if gold.is_integer() else format(Decimal(repr(gold)), "f")
        # JSON written by hand often has bare integers, which have only one spelling
        gold = str(gold) if type(gold) is int else gold
        if not pattern or not isinstance(gold, str):
            return gold
        answer = last_match(pattern, gold)
        if answer is None:
            raise DataError(
                f"{self.place}: no line of {name} matches data.columns.ground_truth_pattern = "
                f"{pattern!r}: {gold!r:.80}"
            )
        return answer.strip()

    @property
    def extra_info(self) -> dict[str, Any]:
        """Further facts as JSON values; other values become text."""
        extra_info = self.columns.get(EXTRA_INFO)
        if extra_info is None:
            return {}
        if not isinstance(extra_info, dict):
            raise DataError(f"{self.place}: {EXTRA_INFO} is not a table: {extra_info!r:.80}")
        return _plain(extra_info)

    def further(self, names: Collection[str]) -> dict[str, Any]:
        """Return the columns with these names, or all, as JSON values."""
        known = (self.names.prompt, DATA_SOURCE, EXTRA_INFO)
        return _plain(
            {
                name: value
                for name, value in self.columns.items()
                if name in names or (ALL_COLUMNS in names and name not in known)
            }
        )

    @property
    def is_text(self) -> bool:
        """Whether the prompt is one text, and no list of chat messages."""
        return isinstance(self._value(self.names.prompt), str)

    @property
    def own_source(self) -> str:
        """The data_source in the row itself; empty without such a column."""
        is_named = self.names.config.data_source is not None
        return self.data_source if is_named or self._value(DATA_SOURCE) is not _MISSING else ""

    @property
    def data_source(self) -> str:
        """Name of the collection that contains the row."""
        name = self.names.config.data_source
        source = self._value(name or DATA_SOURCE)
        if name is None and source is _MISSING:
            return self.names.origin
        if not isinstance(source, str):
            found = "missing" if source is _MISSING else f"not a string but {source!r:.80}"
            raise DataError(f"{self.place}: {name or DATA_SOURCE} is {found}")
        return source

    def _value(self, name: str) -> object:
        """Return the value of a column, or of a key in the tables that a dotted name leads to."""
        value: object = self.columns.get(name, _MISSING)
        if value is not _MISSING or "." not in name:
            return value
        value = self.columns
        for key in name.split("."):
            value = value.get(key, _MISSING) if isinstance(value, Mapping) else _MISSING
        return value

    def find(self, key: str, named: str | None, usual: Iterable[str], found: Iterable[str]) -> str:
        """Return the column of a key: the named one, or the first usual one with a value.

        `found`: names of the file's columns, for the error.
        """
        wanted = (named,) if named is not None else tuple(usual)
        there = [name for name in wanted if self._value(name) is not _MISSING]
        if not there:
            advice = "correct the name" if named is not None else f"name it with {key}"
            raise DataError(
                f"{self.place}: looked for {_either(wanted)}, but there "
                f"{_are(list(found))}; {advice}"
            )
        return next((name for name in there if self.has(name)), there[0])

    def has(self, name: str) -> bool:
        """Return whether a column has a value here, not null."""
        return self._value(name) not in (None, _MISSING)

    def _prompt(self, column: str) -> Messages:
        value = self._value(column)
        if isinstance(value, str):
            return (("user", self._text(column)),)
        return self._chat(column, "neither a text nor a list of chat messages")

    def _chat(self, column: str, problem: str = "not a list of chat messages") -> Messages:
        chat = self._value(column)
        if not isinstance(chat, list) or not chat:
            shown = None if chat is _MISSING else chat
            raise DataError(f"{self.place}: {column} is {problem}: {shown!r:.80}")
        chat = [_with_text(message) for message in chat]
        for message in chat:
            if isinstance(message, dict):
                self._check_read(column, message)
            if not isinstance(message, dict) or not all(
                isinstance(message.get(key), str) for key in ("role", "content")
            ):
                raise DataError(
                    f"{self.place}: a chat message needs a role and a content, both strings (or "
                    f"parts of type text as content); found {message!r:.80}"
                )
            if not _is_unicode(message["content"]):
                raise DataError(f"{self.place}: a chat message is not valid Unicode")
        return tuple((message["role"], message["content"]) for message in chat)

    def _check_read(self, column: str, message: Mapping[str, object]) -> None:
        """Raise DataError if a message has more than its role and content says."""
        if unread := [key for key in _UNREAD if message.get(key)]:
            raise DataError(
                f"{self.place}: a chat message of {column} has {unread[0]}, and only role and "
                "content are read: write it into the content, as the model's template does"
            )
        if message.get("weight") not in (None, 0, 1):
            raise DataError(
                f"{self.place}: a chat message of {column} has weight {message['weight']!r:.20}, "
                "and an answer counts with weight 1, or with 0 not at all"
            )

    def _text(self, column: str) -> str:
        text = self._value(column)
        if not isinstance(text, str):
            shown = None if text is _MISSING else text
            raise DataError(f"{self.place}: {column} is not a string but {shown!r:.80}")
        if not _is_unicode(text):
            raise DataError(f"{self.place}: {column} is not valid Unicode")
        return text


def _with_text(message: Any) -> Any:
    """Return a chat message with one text as content, if it has a list of parts that are texts."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(parts, list):
        return message
    of_text = [part for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    texts = [part["text"] for part in of_text if isinstance(part.get("text"), str)]
    return {**message, "content": "".join(texts)} if len(texts) == len(parts) else message


def _plain(values: Mapping[str, object]) -> dict[str, Any]:
    """Return JSON values; other values become text."""
    text = json.dumps(values, default=str)
    plain: dict[str, Any] = json.loads(text, parse_constant=lambda name: None)
    return plain


def _either(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else f"column {last}"


def _are(names: list[str]) -> str:
    return f"are {', '.join(names)}" if len(names) > 1 else f"is {names[0] if names else 'nothing'}"


def _is_unicode(text: str) -> bool:
    """Return whether a text can be encoded; JSON can have half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
