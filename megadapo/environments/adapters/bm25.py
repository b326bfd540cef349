"""An index of texts for BM25 (Robertson and Zaragoza, 2009), in arrays of numpy."""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

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
