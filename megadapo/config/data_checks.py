"""Checks of the first rows of every source of data, before any process starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path

from megadapo.config import RunConfig
from megadapo.data.config import DataColumns
from megadapo.data.rows import Row
from megadapo.data.sources import (
    EXAMPLES_KEY,
    TEXT_SUFFIXES,
    is_built_in,
    read_rows,
    read_text_rows,
)
from megadapo.errors import DataError
from megadapo.models.folder import is_hub_name

NUM_CHECKED = 64
"""Number of rows of each source that are read."""

Reader = Callable[[str], Iterator[Row]]
"""A reader of the rows of a source."""
ColumnReader = Callable[[str, DataColumns], Iterator[Row]]
"""A reader of the rows of a source with these columns."""


def check_prompts(config: RunConfig) -> list[str]:
    """Check prompts and gold answers, and texts for pretraining."""
    pretraining = config.algorithm.pretraining.data
    others = (
        {} if pretraining is None else {"algorithm.pretraining.data": (pretraining, read_text_rows)}
    )
    return _check_data(config, partial(_checked_prompts, config), others)


def _checked_prompts(config: RunConfig, source: str) -> Iterator[Row]:
    """Yield the rows of prompts; a prompt or gold answer that cannot be used is an error."""
    with_extra_info = config.reads_extra_info
    for row in read_rows(source, config.data.columns, with_extra_info=with_extra_info):
        _, gold, data_source = row.messages, row.ground_truth, row.data_source
        try:
            config.reward.check_gold(gold, data_source)
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from error
        yield row


def check_answers(rows: ColumnReader, are_pairs: bool, config: RunConfig) -> list[str]:
    """Check the rows of a run without rollouts, and the conversations in them."""

    def read(source: str) -> Iterator[Row]:
        for row in rows(source, config.data.columns):
            pair = (row.preference("chosen"), row.preference("rejected")) if are_pairs else ()
            for messages in pair or (row.conversation,):
                row.names.check_texts(messages, row.place)
            yield row

    return _check_data(config, read)


def _check_data(
    config: RunConfig, reader: Reader, others: Mapping[str, tuple[str, Reader]] | None = None
) -> list[str]:
    """Check that sources have rows; `others`: further keys with their sources and readers."""
    data = config.data
    sources = {key: one.source for key, one in data.train_sources.items()} | data.held_out_sources
    readers = {key: (source, reader) for key, source in sources.items()} | dict(others or {})
    problems, notes = [], []
    for key, (source, read) in readers.items():
        if not is_built_in(source) and is_hub_dataset(source):
            notes.append(f"{key} = {source}: no such file here; on the Hub it is not checked")
            continue
        try:
            if not sum(1 for _ in islice(read(source), NUM_CHECKED)):
                problems.append(f"{key} = {source} holds no rows")
        except DataError as error:
            # the examples are read with each source, and their errors name their own key
            of_examples = str(error).startswith(EXAMPLES_KEY)
            problems.append(str(error) if of_examples else f"{key}: {error}")
    if problems:
        raise DataError("\n".join(dict.fromkeys(problems)))
    return notes


def is_hub_dataset(source: str) -> bool:
    """Return whether a source is the name of a dataset on the Hub."""
    path = Path(source).expanduser()
    if path.exists() or path.is_absolute() or source.startswith((".", "~")):
        return False
    name = "/".join(source.split("@")[0].split("/")[:2])
    return is_hub_name(name) and not name.endswith(TEXT_SUFFIXES)
