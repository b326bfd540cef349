"""How often responses say that they look back at what they wrote: "wait", "let me check".

Such words come late in training, and a rise of them is one of the things to watch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

AREA = "reflection/"
ANY_PHRASE = f"{AREA}response_share"
"""Metric of the responses that have any phrase."""


def metric_name(phrase: str) -> str:
    """Name of a phrase's metric: its words with _ between them."""
    return AREA + "_".join(re.findall(r"\w+", phrase.lower()))


def reflection_shares(texts: Sequence[str], phrases: Sequence[str]) -> dict[str, float | None]:
    """Share of the texts that have each phrase, by metric, and of those with any of them.

    None where there is no text, or no phrase.
    """
    searches = [(phrase.lower().split()[0], _pattern(phrase)) for phrase in phrases]
    found = [0] * len(phrases)
    num_any = 0
    for text in texts:
        lowered = text.lower()
        # most texts lack a phrase's first word, which costs much less to find out
        hits = [word in lowered and bool(one.search(lowered)) for word, one in searches]
        found = [count + hit for count, hit in zip(found, hits, strict=True)]
        num_any += any(hits)
    total = len(texts)
    shares = {metric_name(phrase): count for phrase, count in zip(phrases, found, strict=True)}
    return {
        ANY_PHRASE: num_any / total if total and phrases else None,
        **{name: count / total if total else None for name, count in shares.items()},
    }


def _pattern(phrase: str) -> re.Pattern[str]:
    """The phrase as whole words; scripts that leave no space between words have no such bounds."""
    words = phrase.lower().split()
    start = r"(?<![a-z0-9])" if re.match(r"[a-z0-9]", words[0]) else ""
    end = r"(?![a-z0-9])" if re.search(r"[a-z0-9]$", words[-1]) else ""
    return re.compile(start + r"\s+".join(map(re.escape, words)) + end)
