"""Raw rows of prompts and texts, from files, the Hub, built-in tasks and reasoning-gym.

A row knows its file and line, so that errors can name them.
"""

from __future__ import annotations

import csv
import json
import logging
import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megadapo.data import arithmetic, reasoning_gym
from megadapo.data.config import DataColumns
from megadapo.data.rows import (
    ALL_COLUMNS,
    ANSWERS,
    DATA_SOURCE,
    EXTRA_INFO,
    GOLDS,
    OF_ROLLOUTS,
    PROMPTS,
    TEXT,
    Messages,
    Names,
    Row,
)
from megadapo.errors import DataError, InfraError

logger = logging.getLogger(__name__)

PAIR_COLUMNS = ("chosen", "rejected")
"""The columns of preference pairs besides the prompt."""
EXAMPLES_KEY = "data.columns.examples"
"""Key of the file of few-shot examples, which its errors name."""
SUFFIXES = (".parquet", ".jsonl", ".csv")
TEXT_SUFFIXES = (*SUFFIXES, ".txt")
MAX_LINE_BYTES = 1 << 28
"""Longest line of a JSONL file that is read; a damaged file may be one line of any length."""
SPLIT_WORDS = {
    "train": "train",
    "test": "test",
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("eval", "evaluation"), "eval"),
}
"""Splits by the words that stand for them in names of files and folders."""
HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<path>.+))?")
GSM8K_MARK = "#### "
"""Beginning of the line with the answer in a gold text of GSM8K."""
GSM8K_PATTERN = f"^{GSM8K_MARK}(.+)"


def is_built_in(source: str) -> bool:
    """Return whether a source names a built-in task or items of reasoning-gym, and no file."""
    return arithmetic.is_built_in(source) or reasoning_gym.is_source(source)


def read_rows(
    source: str,
    columns: DataColumns | None = None,
    *,
    with_extra_info: bool = False,
    further: Collection[str] = (),
) -> Iterator[Row]:
    """Yield the rows of a file, a folder, a Hub dataset or a built-in source, in order.

    Args:
        columns: names of the columns, which are found without them, and texts around each prompt.
        with_extra_info: read this column of parquet files too.
        further: names of other columns to read, or ALL_COLUMNS.
    """
    names = _names(source, columns or DataColumns())
    if is_built_in(source):
        # its columns have the names that Names has by default
        texts = DataColumns(template=names.config.template, system=names.config.system)
        names = replace(names, config=texts)
        if reasoning_gym.is_source(source):
            rows = reasoning_gym.rows(source)
        else:
            rows = (problem.row() for problem in arithmetic.from_source(source))
        for number, row in enumerate(rows):
            yield Row(f"{source}, row {number}", row, names)
        return
    for file in _files(source, SUFFIXES):
        yield from _prompt_rows(file, names, {*further, *[EXTRA_INFO] * with_extra_info})


def whole_rows(source: str) -> Iterator[Row]:
    """Yield the rows of files with all of their columns, before any is found by its name."""
    for file in _files(source, SUFFIXES):
        yield from _rows(file, (ALL_COLUMNS,))


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
        elif file.suffix in SUFFIXES:
            yield from _rows(file, ())
        else:
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"{file} cannot be read as UTF-8 text: {error}") from error
            yield Row(str(file), {TEXT: text})


def read_pair_rows(source: str, columns: DataColumns | None = None) -> Iterator[Row]:
    """Yield rows of preference pairs in order, from files, folders and Hub datasets.

    `columns`: texts around each prompt, as in `read_rows`; the columns' names are fixed.
    """
    names = _names(source, columns or DataColumns())
    for file in _files(source, SUFFIXES):
        if file.suffix == ".parquet":
            rows = _parquet_rows(file, PAIR_COLUMNS, ("prompt", "messages"))
        else:
            rows = _rows(file, ())
        for row in rows:
            yield Row(row.place, row.columns, names)


def read_answered_rows(source: str, columns: DataColumns | None = None) -> Iterator[Row]:
    """Yield rows of answered conversations in order, from files, folders and Hub datasets.

    `columns`: name of the prompts' column and texts around each prompt, as in `read_rows`.
    """
    names = _names(source, columns or DataColumns())
    optional = (*PROMPTS, *ANSWERS, *OF_ROLLOUTS, *filter(None, [names.config.prompt]))
    for file in _files(source, SUFFIXES):
        for row in _rows(file, optional):
            yield Row(row.place, row.columns, names)


def _names(source: str, columns: DataColumns) -> Names:
    """Return the names before a file is read: the examples, and the data_source by default."""
    examples: Messages = ()
    if columns.examples is not None:
        around = DataColumns(template=columns.template)
        rows = read_answered_rows(columns.examples, around)
        try:
            examples = tuple(message for row in rows for message in row.conversation)
        except DataError as error:
            raise DataError(f"{EXAMPLES_KEY}: {error}") from error
    path = Path(source).expanduser()
    hub = None if path.exists() else HUB_NAME.fullmatch(source)
    return Names(
        origin=path.resolve().stem if hub is None else hub["name"],
        config=columns,
        examples=examples,
    )


def _prompt_rows(file: Path, names: Names, further: Collection[str]) -> Iterator[Row]:
    """Yield a file's rows with the columns that its first row decides on.

    `further`: names of other columns to read, or ALL_COLUMNS.
    """
    config = names.config
    named = filter(None, [config.prompt, config.ground_truth, config.data_source])
    wanted = {*PROMPTS, *GOLDS, *named, DATA_SOURCE, *further}
    rows = _rows(file, wanted)
    first = next(rows, None)
    if first is None:
        return
    is_parquet = file.suffix == ".parquet"
    found: list[str] = pq.read_schema(file).names if is_parquet else [*first.columns]
    prompt = first.find("data.columns.prompt", config.prompt, PROMPTS, found)
    gold = first.find("data.columns.ground_truth", config.ground_truth, GOLDS, found)
    # columns that would have been taken before these; their values in other rows may not be lost
    skipped = [] if config.prompt is not None else [*PROMPTS[: PROMPTS.index(prompt)]]
    skipped += [] if config.ground_truth is not None else GOLDS[: GOLDS.index(gold)]
    names = replace(names, prompt=prompt, ground_truth=gold)
    pattern = config.ground_truth_pattern
    if pattern is None:
        pattern = GSM8K_PATTERN if _has_marks(file, gold, first) else ""
    names = replace(names, pattern=pattern)
    for row in chain([first], rows):
        if filled := [name for name in skipped if row.has(name)]:
            raise DataError(
                f"{row.place}: {filled[0]} has a value, and in {first.place} it has none, where "
                f"{prompt} and {gold} were found instead: name the columns with "
                "data.columns.prompt and data.columns.ground_truth"
            )
        yield Row(row.place, row.columns, names)


def _has_marks(file: Path, column: str, first: Row) -> bool:
    """Return whether every gold text of a file has a line `#### ANSWER`, as those of GSM8K."""
    if "." in column or not _has_mark(first, column):
        return False
    without = next((row for row in _rows(file, (column,)) if not _has_mark(row, column)), None)
    if without is not None:
        logger.warning(
            "%s: %s has no line that begins with %r, as rows before have, so the whole text is "
            "the gold answer; set data.columns.ground_truth_pattern",
            *(without.place, column, GSM8K_MARK),
        )
    return without is None


def _has_mark(row: Row, column: str) -> bool:
    gold = row.columns.get(column)
    return isinstance(gold, str) and f"\n{GSM8K_MARK}" in f"\n{gold}"


def _rows(file: Path, columns: Collection[str]) -> Iterator[Row]:
    """Yield a file's rows; of parquet only the columns, or the first part of a dotted name."""
    if file.suffix == ".jsonl":
        return _jsonl_rows(file)
    if file.suffix == ".csv":
        return _csv_rows(file)
    return _parquet_rows(file, (), (*columns, *(name.split(".")[0] for name in columns)))


def _files(source: str, suffixes: tuple[str, ...]) -> list[Path]:
    path = Path(source).expanduser()
    if path.exists():
        return _data_files(path, source, suffixes)
    match = HUB_NAME.fullmatch(source)
    # a folder here with the name of an organisation is meant, and the file in it is missing
    is_local = source.startswith((".", "~")) or Path(source.split("/")[0]).is_dir()
    if match is None or is_local or match["name"].endswith(suffixes):
        raise DataError(
            f"there is no file or folder {source} (looked in {Path.cwd()} and beside the recipe)"
        )
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
    names = [str(file.relative_to(path).with_suffix("")).lower() for file in files]
    words = {word for name in names for word in re.findall("[a-z]+", name)}
    splits = list(dict.fromkeys(split for word, split in SPLIT_WORDS.items() if word in words))
    if len(splits) > 1:
        # training on a test split would only show in results that look too good
        found = ", ".join(splits)
        raise DataError(f"{source} has the splits {found}; name the file or folder to use")
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
        if missing := [name for name in needed if name not in names]:
            raise DataError(f"{file} has no column {', '.join(missing)}; it has {', '.join(names)}")
        wanted = [name for name in names if {name, ALL_COLUMNS} & {*needed, *optional}]
        short = [
            (name, kind.to_pandas_dtype())
            for name, kind in zip(names, parquet.schema_arrow.types, strict=True)
            if name in wanted and kind in (pa.float16(), pa.float32())
        ]
        number = 0
        for batch in parquet.iter_batches(batch_size=8192, columns=wanted):
            for columns in batch.to_pylist():
                for name, float_kind in short:
                    # 0.1 in fp32 is 0.10000000149011612 as a Python float
                    if columns[name] is not None:
                        columns[name] = float(str(float_kind(columns[name])))
                yield Row(f"{file}, row {number}", columns)
                number += 1
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as parquet: {error}") from error


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


def _csv_rows(file: Path) -> Iterator[Row]:
    """Yield the rows below the names in the first line; every value is a text."""
    with file.open(newline="", encoding="utf-8-sig") as lines:
        try:
            for number, columns in enumerate(csv.DictReader(lines, strict=True)):
                if None in columns:
                    raise DataError(f"{file}, row {number}: more values than the first line has")
                yield Row(f"{file}, row {number}", columns)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{file} cannot be read as CSV: {error}") from error
