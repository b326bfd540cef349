"""The environment "search": a search engine over a local corpus, as a tool."""

from __future__ import annotations

import json
import os
import re
import threading
import unicodedata
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np

from megadapo.environments.adapters.calls import OUTPUT, Tool, require_positive

# letters and digits in a row; in scripts without blanks between words, each character
_SINGLE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_TERM = re.compile(rf"[{_SINGLE}]|[^\W_{_SINGLE}]+")
_ASCII_TERM = re.compile("[a-z0-9]+")


def terms_of(text: str) -> list[str]:
    """Return the words of a text, without case and in one form of Unicode."""
    if text.isascii():
        return _ASCII_TERM.findall(text.lower())
    return _TERM.findall(unicodedata.normalize("NFKC", text).casefold())


class Index:
    """The terms of texts, each with the scores of the texts that contain the term.

    Args:
        k1: how fast the score of a term that is repeated is saturated.
        b: how much a long text is punished, from 0 to 1.
    """

    def __init__(self, texts: Iterable[str], *, k1: float = 0.9, b: float = 0.4) -> None:
        # a new term gets the next number
        terms: defaultdict[str, int] = defaultdict(lambda: len(terms))
        words, lengths = array("i"), array("i")
        for text in texts:
            num_before = len(words)
            words.extend(map(terms.__getitem__, terms_of(text)))
            lengths.append(len(words) - num_before)
        self._terms = dict(terms)
        self._num_texts = num = len(lengths)
        sizes = np.array(lengths, dtype=np.float64)
        # one number for each word, by term and then by text; equal ones are repetitions
        pairs = np.array(words, dtype=np.int64) * max(num, 1)
        pairs += np.repeat(np.arange(num), np.array(lengths, dtype=np.int64))
        pairs.sort()
        firsts = np.flatnonzero(np.diff(pairs, prepend=-1))
        counts = np.diff(firsts, append=len(pairs))
        number_of_term, text_numbers = np.divmod(pairs[firsts], max(num, 1))
        num_having = np.bincount(number_of_term, minlength=len(terms))
        rarity = np.log(1 + (num - num_having + 0.5) / (num_having + 0.5))
        norms = k1 * (1 - b + b * sizes / max(sizes.mean() if num else 0.0, 1.0))
        scores = rarity[number_of_term] * counts * (k1 + 1) / (counts + norms[text_numbers])
        self._starts = np.concatenate([[0], np.cumsum(num_having)])
        self._texts, self._scores = text_numbers.astype(np.int32), scores.astype(np.float32)

    def search(self, query: str, num: int) -> list[int]:
        """Return the numbers of the best texts that have a term of the query, the best first.

        Texts with the same score are in the order of the corpus.
        """
        scores = np.zeros(self._num_texts)
        # in a fixed order, so that sums are the same in every process
        for term in sorted(set(terms_of(query))):
            if (number := self._terms.get(term)) is not None:
                of_term = slice(self._starts[number], self._starts[number + 1])
                scores[self._texts[of_term]] += self._scores[of_term]
        num_found = int(np.count_nonzero(scores))
        num = min(num, num_found)
        if num <= 0:
            return []
        worst = np.partition(scores, -num)[-num]
        best = np.flatnonzero(scores >= worst)
        # stable, so equal scores keep the order of the corpus
        ranked: list[int] = best[np.argsort(-scores[best], kind="stable")][:num].tolist()
        return ranked


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
            self._rows, self._index = _read(path, status.st_mtime_ns, status.st_size)

    async def search(self, query: str, num: int = 0) -> str:
        """Search a collection of texts; return the titles and texts found.

        Args:
            query: words to search for.
            num: number of results; 0: the usual number.
        """
        if not 0 <= num <= self._max_num:
            return f'Error: search: argument "num" must be from 1 to {self._max_num}'
        found = self._index.search(query[:MAX_QUERY], num or self._num)
        rows = (self._rows[number] for number in found)
        return (
            "\n\n".join(
                f"[{place}] {row['title']}\n{self._cut(row['text'])}"
                for place, row in enumerate(rows, start=1)
            )
            or NO_RESULTS
        )

    def _cut(self, text: str) -> str:
        return text if len(text) <= self._max_chars else text[: self._max_chars].rstrip() + " ..."


@lru_cache(maxsize=4)
def _read(path: str, time_ns: int, num_bytes: int) -> tuple[list[Mapping[str, str]], Index]:
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
    return rows, Index(f"{row['title']}\n{row['text']}" for row in rows)
