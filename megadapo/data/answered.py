"""Answered conversations: the tokens that supervised fine-tuning predicts, and rows to write.

Prompts and responses have the tokens of a run with rollouts. The chat template renders the messages
before an answer as it renders a prompt, and the answer ends with a token at which sampling stops:
the end of a turn in the template, or else the tokenizer's end-of-sequence token.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megadapo.data.config import DataColumns
from megadapo.data.group import Group, Response
from megadapo.data.pretraining import LabelledTokens
from megadapo.data.prompts import Prompt, render, some
from megadapo.data.rows import Messages, Row
from megadapo.data.sources import read_answered_rows
from megadapo.errors import DataError
from megadapo.tokens.chat import ASSISTANT, answer_ids, opened_thought
from megadapo.tokens.stops import stop_ids, without_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class AnswerEncoder:
    """Turns answered conversations into labelled tokens."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int,
        max_response_tokens: int,
    ) -> None:
        """The limits hold for each answer and the messages before it.

        Raises:
            DataError: no token ends a response.
        """
        self._stops = stop_ids(tokenizer)
        if not self._stops:
            raise DataError(
                "model.path has no token that ends a response: set eos_token in its "
                "tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self._opening = opened_thought(tokenizer)
        self.num_open = 0
        """Number of encoded answers whose thought does not end."""
        self._max_prompt_tokens = max_prompt_tokens
        self._max_response_tokens = max_response_tokens

    def response_ids(self, text: str) -> list[int]:
        """Return the tokens of a response, with the one that ends it."""
        for name in self._tokenizer.convert_ids_to_tokens(list(self._stops)):
            # the answers of some files have the end already; an id beyond the tokenizer has no name
            if name is not None and text.endswith(name):
                text = text.removesuffix(name)
                break
        return [*answer_ids(text, self._tokenizer), self._stops[0]]

    def text_of(self, response_ids: Sequence[int]) -> str:
        """Return the text of sampled tokens, without special tokens."""
        text = self._tokenizer.decode(
            without_end(list(response_ids), self._stops),
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str)
        return text

    def encode(self, row: Row) -> list[LabelledTokens]:
        """Return the sequences of a conversation; usually one.

        An answer continues the sequence of the answer before it if these are the tokens that the
        template gives. Otherwise it starts another, as with a template that
        drops earlier thoughts.

        Raises:
            DataError: a message cannot be used.
            OverlongError: a prompt or an answer has too many tokens.
        """
        messages, given_answers = row.conversation, row.given_answers
        row.names.check_texts(messages, row.place)
        answers = [
            place
            for place, (role, _) in enumerate(messages)
            if role == ASSISTANT and place not in given_answers
        ]
        if not answers or answers[0] == 0:
            raise DataError(f"{row.place}: no message of the {ASSISTANT} to learn follows another")
        sequences: list[tuple[list[int], list[bool]]] = []
        for place in answers:
            ids, predicted = self._answer(row, messages, place, is_last=place == answers[-1])
            prompt = self._prompt_ids(row, messages[:place])
            tokens, wanted = sequences[-1] if sequences else ([], [])
            if not sequences or prompt[: len(tokens)] != tokens:
                tokens, wanted = [], []
                sequences.append((tokens, wanted))
            given = prompt[len(tokens) :]
            tokens += [*given, *ids]
            wanted += [False] * len(given) + predicted
        return [
            (np.array(tokens, dtype=np.int32), np.array(wanted, dtype=np.bool_))
            for tokens, wanted in sequences
        ]

    def _prompt_ids(self, row: Row, messages: Messages) -> list[int]:
        prompt = Prompt(row.place, messages, "", "")
        ids = render(prompt, self._tokenizer, tools=row.tools)
        if len(ids) > self._max_prompt_tokens:
            raise OverlongError(
                f"{row.place}: a prompt has {len(ids)} tokens; at most data.max_prompt_tokens = "
                f"{self._max_prompt_tokens} are allowed"
            )
        return ids

    def _answer(
        self, row: Row, messages: Messages, place: int, *, is_last: bool
    ) -> tuple[list[int], list[bool]]:
        """Return the tokens of an answer, and whether each is to be predicted."""
        sampled = row.columns.get("response_ids") if is_last else None
        if sampled is None:
            ids = self.response_ids(self._without_opening(row, messages[place][1]))
        else:
            ids = self._sampled_ids(row, sampled, messages[place][1])
        if len(ids) > self._max_response_tokens:
            raise OverlongError(
                f"{row.place}: an answer has {len(ids)} tokens; at most "
                f"rollout.max_response_tokens = {self._max_response_tokens} are allowed"
            )
        wanted = [True] * len(ids)
        spans = row.columns.get("environment_spans") if is_last else None
        # they count response_ids, so without these none fits
        num_sampled = 0 if sampled is None else len(ids)
        for start, stop in [] if spans is None else _checked_spans(spans, num_sampled, row.place):
            wanted[start:stop] = [False] * (stop - start)
        return ids, wanted

    def _without_opening(self, row: Row, text: str) -> str:
        """Return an answer without the beginning that the generation prompt has already."""
        opening = self._opening
        if not opening or row.is_sampled:
            return text
        name = opening.strip()
        close = f"{name[0]}/{name[1:]}"
        begins = text.lstrip().startswith(name)
        if not begins and close not in text:
            raise DataError(
                f"{row.place}: the chat template begins each answer with {name}, and this one has "
                "no thought: add it, or turn thoughts off with data.chat_template_kwargs"
            )
        if close not in text:
            self.num_open += 1
        if not begins:
            return text
        return text.lstrip().removeprefix(name).removeprefix(opening.removeprefix(name))

    def _sampled_ids(self, row: Row, sampled: object, text: str) -> list[int]:
        size = len(self._tokenizer)
        if not (
            isinstance(sampled, list)
            and all(type(one) is int and 0 <= one < size for one in sampled)
            and self.text_of(sampled) == text
        ):
            raise DataError(
                f"{row.place}: response_ids are not the tokens of the answer: another tokenizer "
                "made them; leave them out to encode the text"
            )
        return list(sampled)


def _checked_spans(spans: object, num_tokens: int, place: str) -> list[tuple[int, int]]:
    """Return the spans of an answer that no model has sampled."""
    found: list[tuple[int, int]] = []
    for span in spans if isinstance(spans, list) else [None]:
        is_pair = isinstance(span, list) and [type(one) for one in span] == [int, int]
        start, stop = span if span and is_pair else (0, 0)
        if not (found[-1][1] if found else 0) <= start < stop <= num_tokens:
            raise DataError(
                f"{place}: environment_spans are not ascending pairs of a start and a stop in the "
                f"{num_tokens} response_ids"
            )
        found.append((start, stop))
    return found


class OverlongError(DataError):
    """A prompt or an answer of a conversation is too long."""


def load_answered(
    source: str,
    encoder: AnswerEncoder,
    *,
    columns: DataColumns | None = None,
    overlong: Literal["error", "drop"] = "error",
) -> list[list[LabelledTokens]]:
    """Return the sequences of each row of a source, in order, without rows that are too long.

    Raises:
        DataError: a row cannot be read, or is too long and `overlong` is "error".
    """
    rows: list[list[LabelledTokens]] = []
    too_long: list[str] = []
    for row in read_answered_rows(source, columns):
        try:
            rows.append(encoder.encode(row))
        except OverlongError as error:
            too_long.append(str(error))
    if too_long and overlong == "error":
        advice = 'Raise the limit, or set data.overlong_prompts = "drop"'
        raise DataError("\n".join([*some(too_long), advice]))
    if not rows:
        raise DataError(f"{source} has no usable row")
    logger.info("%s: %d rows; left out: %d that are too long", source, len(rows), len(too_long))
    if encoder.num_open:
        logger.warning("%s: %d answers begin a thought and do not end it", source, encoder.num_open)
        encoder.num_open = 0
    return rows


def fingerprint(rows: Sequence[Sequence[LabelledTokens]]) -> str:
    """Return a hash of the rows' tokens and labels."""
    digest = hashlib.sha256()
    for row in rows:
        for tokens, wanted in row:
            # the length separates sequences, so that different lists differ
            digest.update(f"/{len(tokens)}/".encode() + tokens.tobytes() + wanted.tobytes())
        digest.update(b";")
    return digest.hexdigest()


class CorrectRows:
    """The rows of correct responses, which `load_answered` reads; equal ones are written once."""

    def __init__(
        self,
        path: Path,
        encoder: AnswerEncoder,
        tools: Callable[[Prompt], Sequence[Mapping[str, Any]]] = lambda _: (),
        *,
        max_per_prompt: int | None = None,
    ) -> None:
        """Begin an empty file.

        Args:
            tools: returns the JSON schemas that the chat template shows with a prompt.
            max_per_prompt: number of responses of one prompt to write; None writes all.
        """
        self.path = path
        self.num_rows = self.num_repeated = self.num_truncated = 0
        self._encoder, self._tools = encoder, tools
        self._max_per_prompt = max_per_prompt
        self._texts: defaultdict[str, set[str]] = defaultdict(set)
        path.write_text("")

    def add(self, groups: Iterable[Group]) -> None:
        """Write the correct and complete responses of groups."""
        rows = [row for group in groups for row in self._rows(group)]
        self.num_rows += len(rows)
        with self.path.open("a", encoding="utf-8") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in rows)

    def _rows(self, group: Group) -> Iterator[dict[str, Any]]:
        texts = self._texts[group.prompt.id]
        for response, score, is_correct in zip(
            group.responses, group.scores, group.need_correct(), strict=True
        ):
            ids = response.token_ids.tolist()
            text = self._encoder.text_of(ids)
            if not is_correct:
                continue
            if response.truncated:
                # a token that ends it would be invented
                self.num_truncated += 1
            elif text in texts:
                self.num_repeated += 1
            elif self._max_per_prompt is None or len(texts) < self._max_per_prompt:
                texts.add(text)
                yield self._row(group.prompt, text, response, score.reward)

    @property
    def summary(self) -> str:
        """One line about the rows."""
        num_prompts = sum(map(bool, self._texts.values()))
        return (
            f"{self.num_rows} correct responses to {num_prompts} prompts; left out: "
            f"{self.num_repeated} repeated, {self.num_truncated} truncated"
        )

    def _row(self, prompt: Prompt, text: str, response: Response, reward: float) -> dict[str, Any]:
        # only the sampled answer is learned
        messages = [
            {"role": role, "content": content, **({"weight": 0} if role == ASSISTANT else {})}
            for role, content in prompt.messages
        ]
        row: dict[str, Any] = {
            "messages": [*messages, {"role": ASSISTANT, "content": text}],
            "prompt_id": prompt.id,
            "reward": reward,
        }
        if tools := self._tools(prompt):
            row["tools"] = list(tools)
        ids = response.token_ids.tolist()
        edges = np.flatnonzero(np.diff(response.is_sampled, prepend=True, append=True))
        if len(edges):
            # the text does not tell the turns of the model from those of its environment
            return row | {"response_ids": ids, "environment_spans": edges.reshape(-1, 2).tolist()}
        # if encoding the text gives other tokens, the sampled ones are trained on
        return row if self._encoder.response_ids(text) == ids else row | {"response_ids": ids}
