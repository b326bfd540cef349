"""Shares of responses with self-checking phrases such as "wait" or "let me check".

Such phrases appear late in training, and their rise is worth watching.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

AREA = "reflection/"
ANY_PHRASE = f"{AREA}response_share"
"""Metric for responses with any phrase."""


def metric_name(phrase: str) -> str:
    """Return the metric of a phrase: its words joined by _."""
    return AREA + "_".join(re.findall(r"\w+", phrase.lower()))


def reflection_shares(texts: Sequence[str], phrases: Sequence[str]) -> dict[str, float | None]:
    """Return the share of texts with each phrase, and with any phrase, by metric name.

    A share is None without texts or phrases.
    """
    searches = [_finder(phrase) for phrase in phrases]
    found = [0] * len(phrases)
    num_any = 0
    for text in texts:
        lowered = text.lower()
        hits = [finds(lowered) for finds in searches]
        found = [count + hit for count, hit in zip(found, hits, strict=True)]
        num_any += any(hits)
    total = len(texts)
    shares = {metric_name(phrase): count for phrase, count in zip(phrases, found, strict=True)}
    return {
        ANY_PHRASE: num_any / total if total and phrases else None,
        **{name: count / total if total else None for name, count in shares.items()},
    }


def _finder(phrase: str) -> Callable[[str], bool]:
    """Return a search for a phrase as whole words in lower case, for texts of megabytes."""
    words = phrase.lower().split()
    # scripts without spaces between words have no bounds
    start = r"(?<![a-z0-9])" if re.match(r"[a-z0-9]", words[0]) else ""
    end = r"(?![a-z0-9])" if re.search(r"[a-z0-9]$", words[-1]) else ""
    pattern = re.compile(start + r"\s+".join(map(re.escape, words)) + end)
    # most texts lack the longest word
    rarest, first = max(words, key=len), words[0]

    def finds(lowered: str) -> bool:
        # plain searches for single words are ten times as fast as the pattern's
        if rarest not in lowered:
            return False
        at = lowered.find(first)
        while at >= 0:
            if pattern.match(lowered, at):
                return True
            at = lowered.find(first, at + 1)
        return False

    return finds
