"""Raw rows of prompts and texts, from files, the Hub and the built-in tasks.

A row knows its file and line, so that errors can name them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from megadapo.data import arithmetic
from megadapo.errors import DataError, InfraError

COLUMNS = ("data_source", "prompt", "reward_model")
EXTRA_INFO = "extra_info"
"""The column with further facts about a prompt; few readers need it."""
ANSWERED_COLUMNS = ("messages", "prompt", "response", "answer", "response_ids")
"""Columns of answered conversations; `Row.conversation` reads one way to write them."""
TEXT = "text"
"""The only column that pretraining data needs."""
PAIR_COLUMNS = ("chosen", "rejected")
"""The columns of preference pairs besides the prompt."""
SUFFIXES = (".parquet", ".jsonl")
TEXT_SUFFIXES = (*SUFFIXES, ".txt")
MAX_LINE_BYTES = 1 << 28
"""Longest line of a JSONL file that is read; a damaged file may be one line of any length."""
SPLIT_WORDS = ("train", "test", "validation")
HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<path>.+))?")

Messages = tuple[tuple[str, str], ...]
"""(role, content) of each chat message."""


@dataclass(frozen=True)
class Row:
    """One unchecked row of a source."""

    place: str
    """File and row (parquet, from 0) or line (JSONL, from 1), for error messages."""
    columns: Mapping[str, object]

    @property
    def messages(self) -> Messages:
        """Chat messages, checked."""
        return self._chat("prompt")

    def preference(self, answer: Literal["chosen", "rejected"]) -> Messages:
        """Return the messages of a preference pair's prompt and of one of its answers, checked.

        The prompt may be one text, or be part of both answers.
        """
        prompt: Messages = ()
        for column in ("prompt", "messages"):
            if self.columns.get(column) is not None:
                is_text = isinstance(self.columns[column], str)
                prompt = (("user", self._text(column)),) if is_text else self._chat(column)
                break
        if isinstance(self.columns.get(answer), list):
            return prompt + self._chat(answer)
        if not prompt:
            raise DataError(f"{self.place}: a pair needs a prompt, or answers that are chats")
        return (*prompt, ("assistant", self._text(answer)))

    @property
    def conversation(self) -> Messages:
        """Messages of an answered conversation, checked.

        They are `messages`, or `prompt` (chat messages, or the text of one by the user) followed by
        the text in `response` or `answer`.
        """
        if self.columns.get("messages") is not None:
            return self._chat("messages")
        answers = [name for name in ("response", "answer") if self.columns.get(name) is not None]
        if self.columns.get("prompt") is None or len(answers) != 1:
            raise DataError(
                f"{self.place}: expected messages, or prompt with either response or answer; found "
                f"{', '.join(name for name in self.columns) or 'nothing'}"
            )
        is_text = isinstance(self.columns["prompt"], str)
        prompt = (("user", self._text("prompt")),) if is_text else self._chat("prompt")
        return (*prompt, ("assistant", self._text(answers[0])))

    def _chat(self, column: str) -> Messages:
        chat = self.columns.get(column)
        if not isinstance(chat, list) or not chat:
            raise DataError(f"{self.place}: {column} is not a list of chat messages: {chat!r:.80}")
        for message in chat:
            if not isinstance(message, dict) or not all(
                isinstance(message.get(key), str) for key in ("role", "content")
            ):
                raise DataError(
                    f"{self.place}: a chat message needs a role and a content, both strings; "
                    f"found {message!r:.80}"
                )
            if not _is_unicode(message["content"]):
                raise DataError(f"{self.place}: a chat message is not valid Unicode")
        return tuple((message["role"], message["content"]) for message in chat)

    @property
    def text(self) -> str:
        """Text for a language-model loss, checked; it may be empty."""
        return self._text(TEXT)

    def _text(self, column: str) -> str:
        text = self.columns.get(column)
        if not isinstance(text, str):
            raise DataError(f"{self.place}: {column} is not a string but {text!r:.80}")
        if not _is_unicode(text):
            raise DataError(f"{self.place}: {column} is not valid Unicode")
        return text

    @property
    def ground_truth(self) -> object:
        """Gold answer of the row; nothing here checks that it can be scored."""
        reward_model = self.columns.get("reward_model")
        if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
            raise DataError(f"{self.place}: reward_model.ground_truth is missing")
        gold = reward_model["ground_truth"]
        # JSON written by hand often has bare integers, which have only one spelling
        return str(gold) if type(gold) is int else gold

    @property
    def extra_info(self) -> dict[str, Any]:
        """Further facts as JSON values; other values become text."""
        extra_info = self.columns.get(EXTRA_INFO)
        if extra_info is None:
            return {}
        if not isinstance(extra_info, dict):
            raise DataError(f"{self.place}: {EXTRA_INFO} is not a table: {extra_info!r:.80}")
        text = json.dumps(extra_info, default=str)
        plain: dict[str, Any] = json.loads(text, parse_constant=lambda name: None)
        return plain

    @property
    def data_source(self) -> str:
        """Name of the collection that contains the row."""
        source = self.columns.get("data_source")
        if not isinstance(source, str):
            raise DataError(f"{self.place}: data_source is not a string but {source!r:.80}")
        return source


def read_rows(source: str, *, with_extra_info: bool = False) -> Iterator[Row]:
    """Yield the rows of a file, a folder of files, a Hub dataset or a built-in task, in order.

    Args:
        with_extra_info: read this column of parquet files too.

    Raises:
        DataError: the source does not exist, cannot be read, or lacks a column.
        InfraError: the Hub does not answer.
    """
    if arithmetic.is_built_in(source):
        for number, problem in enumerate(arithmetic.from_source(source)):
            yield Row(f"{source}, row {number}", problem.row())
        return
    optional = (EXTRA_INFO,) if with_extra_info else ()
    for file in _files(source, SUFFIXES):
        if file.suffix == ".parquet":
            yield from _parquet_rows(file, COLUMNS, optional)
        else:
            yield from _jsonl_rows(file)


def read_text_rows(source: str) -> Iterator[Row]:
    """Yield rows of texts in order, from the sources of `read_rows` and .txt files.

    A .txt file is one text; other files have a column `text`. The texts of a built-in task are its
    problems with their answers.

    Raises:
        DataError: the source does not exist, cannot be read, or lacks the column.
    """
    if arithmetic.is_built_in(source):
        for number, text in enumerate(arithmetic.texts_from_source(source)):
            yield Row(f"{source}, row {number}", {TEXT: text})
        return
    for file in _files(source, TEXT_SUFFIXES):
        if file.suffix == ".parquet":
            yield from _parquet_rows(file, (TEXT,))
        elif file.suffix == ".jsonl":
            yield from _jsonl_rows(file)
        else:
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"{file} cannot be read as UTF-8 text: {error}") from error
            yield Row(str(file), {TEXT: text})


def read_pair_rows(source: str) -> Iterator[Row]:
    """Yield rows of preference pairs in order, from files, folders and Hub datasets.

    Raises:
        DataError: the source does not exist, cannot be read, or lacks a column.
    """
    for file in _files(source, SUFFIXES):
        if file.suffix == ".parquet":
            yield from _parquet_rows(file, PAIR_COLUMNS, ("prompt", "messages"))
        else:
            yield from _jsonl_rows(file)


def read_answered_rows(source: str) -> Iterator[Row]:
    """Yield rows of answered conversations in order, from files, folders and Hub datasets.

    Raises:
        DataError: the source does not exist or cannot be read.
    """
    for file in _files(source, SUFFIXES):
        if file.suffix == ".parquet":
            yield from _parquet_rows(file, (), ANSWERED_COLUMNS)
        else:
            yield from _jsonl_rows(file)


def _files(source: str, suffixes: tuple[str, ...]) -> list[Path]:
    path = Path(source).expanduser()
    if path.exists():
        return _data_files(path, source, suffixes)
    match = HUB_NAME.fullmatch(source)
    if match is None or source.startswith((".", "~")) or match["name"].endswith(suffixes):
        raise DataError(f"there is no file or folder {source} (looked in {Path.cwd()})")
    return _data_files(_download(source, match, suffixes), source, suffixes)


def _data_files(path: Path, source: str, suffixes: tuple[str, ...]) -> list[Path]:
    *others, last = suffixes
    if path.is_file():
        if path.suffix not in suffixes:
            raise DataError(f"{source} is neither a {', a '.join(others)} nor a {last} file")
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in suffixes and file.is_file())
    if not files:
        raise DataError(f"{source} has no {', '.join(others)} or {last} file")
    splits = [word for word in SPLIT_WORDS if any(word in file.stem for file in files)]
    if len(splits) > 1:
        # training on a test split would only show in results that look too good
        raise DataError(f"{source} has the splits {', '.join(splits)}; name the file to use")
    return files


def _download(source: str, match: re.Match[str], suffixes: tuple[str, ...]) -> Path:
    """Download a dataset, or one file or folder of it, into the Hub's cache.

    Raises:
        DataError: there is no such dataset, file or folder.
        InfraError: the Hub does not answer.
    """
    from huggingface_hub import errors, snapshot_download

    path = match["path"] or ""
    wanted = [path, f"{path.rstrip('/')}/*"] if path else [f"*{suffix}" for suffix in suffixes]
    try:
        folder = snapshot_download(
            match["name"],
            repo_type="dataset",
            revision=match["revision"],
            allow_patterns=wanted,
        )
    except (errors.HFValidationError, OSError) as error:
        reason = [*str(error).strip().splitlines(), type(error).__name__][0]
        # a Hub that does not answer now can answer later
        is_away = isinstance(error, errors.LocalEntryNotFoundError)
        is_away &= not isinstance(error.__cause__, errors.OfflineModeIsEnabled)
        kind = InfraError if is_away else DataError
        raise kind(
            f"{source} is no local file or folder, and the Hub dataset {match['name']} cannot be "
            f"read: {reason}"
        ) from error
    found = Path(folder, path)
    if not found.exists():
        raise DataError(f"the Hub dataset {match['name']} has no file or folder {path}")
    return found


def _parquet_rows(
    file: Path, needed: tuple[str, ...], optional: tuple[str, ...] = ()
) -> Iterator[Row]:
    try:
        parquet = pq.ParquetFile(file)
        names = parquet.schema_arrow.names
        _check_columns(file, names, needed)
        wanted = [*needed, *(name for name in optional if name in names)]
        number = 0
        for batch in parquet.iter_batches(batch_size=8192, columns=wanted):
            for columns in batch.to_pylist():
                yield Row(f"{file}, row {number}", columns)
                number += 1
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as parquet: {error}") from error


def _check_columns(file: Path, names: list[str], needed: tuple[str, ...]) -> None:
    missing = [name for name in needed if name not in names]
    if missing:
        schema = (
            ". The schema of DAPO-Math-17k is needed: data_source, prompt (chat messages) and "
            "reward_model.ground_truth"
        )
        raise DataError(
            f"{file} has no column {', '.join(missing)}; it has {', '.join(names)}"
            f"{schema if needed == COLUMNS else ''}"
        )


def _jsonl_rows(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES), b""), start=1):
            if not line.strip():
                continue
            place = f"{file}, line {number}"
            if len(line) == MAX_LINE_BYTES:
                raise DataError(f"{place}: longer than {MAX_LINE_BYTES >> 20} MiB")
            try:
                columns = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{place}: not JSON: {error}") from error
            if not isinstance(columns, dict):
                raise DataError(f"{place}: not a JSON object but {type(columns).__name__}")
            yield Row(place, columns)


def _is_unicode(text: str) -> bool:
    """Return whether a text can be encoded; JSON can have half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
