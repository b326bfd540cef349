"""The environment "search": a search engine over a local corpus, as a tool."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from megadapo.environments.adapters.bm25 import Index
from megadapo.environments.adapters.calls import OUTPUT, Tool, require_positive

MAX_QUERY = 1000
"""Characters of a query that count."""
FIELDS = ("id", "title", "text")
NO_RESULTS = "(no results)"

_lock = threading.Lock()


class Search(Tool):
    """A search by BM25, whose index is made once in each process.

    Args:
        corpus: path of a JSONL file, whose rows have the texts "id", "title" and "text".
        num: results of a search that names no number.
        max_num: most results of a search.
        max_chars: characters of a result's text; the rest is cut off.

    Raises:
        ValueError: an option, or a row of the corpus, is wrong.
        OSError: the corpus cannot be read.
    """

    def __init__(
        self,
        *,
        corpus: str,
        num: int = 3,
        max_num: int = 10,
        max_chars: int = 1000,
        start: str = "",
        stop: str = "",
        output: str = OUTPUT,
    ) -> None:
        super().__init__(self.search, start=start, stop=stop, output=output)
        require_positive(int, num=num, max_num=max_num, max_chars=max_chars)
        if num > max_num:
            raise ValueError(f"the option num = {num} must be at most max_num = {max_num}")
        self._num, self._max_num, self._max_chars = num, max_num, max_chars
        path = os.path.realpath(corpus)
        status = os.stat(path)
        # objects are created in several threads at the same time
        with _lock:
            # a changed file is another one
            self._corpus = _read(path, status.st_mtime_ns, status.st_size)

    async def search(self, query: str, num: int = 0) -> str:
        """Search a collection of texts; return the titles and texts found.

        Args:
            query: words to search for.
            num: number of results; 0: the usual number.
        """
        if not 0 <= num <= self._max_num:
            return f'Error: search: argument "num" must be from 1 to {self._max_num}'
        found = self._corpus.index.search(query[:MAX_QUERY], num or self._num)
        rows = (self._corpus.rows[number] for number in found)
        return (
            "\n\n".join(
                f"[{place}] {row['title']}\n{self._cut(row['text'])}"
                for place, row in enumerate(rows, start=1)
            )
            or NO_RESULTS
        )

    def _cut(self, text: str) -> str:
        return text if len(text) <= self._max_chars else text[: self._max_chars].rstrip() + " ..."


@dataclass(frozen=True)
class _Corpus:
    rows: list[Mapping[str, str]]
    index: Index


@lru_cache(maxsize=4)
def _read(path: str, time_ns: int, num_bytes: int) -> _Corpus:
    rows: list[Mapping[str, str]] = []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                rows.append({name: row[name] for name in FIELDS})
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: expected a JSON object with {', '.join(FIELDS)} "
                    f"({type(error).__name__}: {error})"
                ) from error
            if not all(isinstance(value, str) for value in rows[-1].values()):
                raise ValueError(f"{path}, line {number}: {', '.join(FIELDS)} must be texts")
    if not rows:
        raise ValueError(f"{path} has no rows")
    return _Corpus(rows, Index(f"{row['title']}\n{row['text']}" for row in rows))
