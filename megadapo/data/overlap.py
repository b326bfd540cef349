"""Held-out problems that are also trained on: a score on them says nothing of others."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Iterable, Sequence

from megadapo.data.prompts import Prompt

logger = logging.getLogger(__name__)

MAX_LISTED = 3
"""Problems that a warning quotes; the rest are counted."""

_KEPT_SYMBOLS = "+-*/=<>^%!."
_DROPPED = re.compile(rf"[^\w{re.escape(_KEPT_SYMBOLS)}]|_")


def normalised(text: str) -> str:
    """A problem without what may differ between two copies of it.

    Case, width of characters, white space, punctuation, dollar signs and braces go; signs that make
    another problem stay, and so do points within numbers.
    """
    plain = _DROPPED.sub("", unicodedata.normalize("NFKC", text).casefold())
    return re.sub(r"\.(?!\d)", "", plain)


def overlapping(training: Iterable[Prompt], held_out: Sequence[Prompt]) -> list[Prompt]:
    """Return the held-out problems that are among the training prompts, in their order."""
    known = {_key(prompt) for prompt in training}
    return [prompt for prompt in held_out if _key(prompt) in known]


def warn_of_overlap(training: Sequence[Prompt], held_out: Sequence[Prompt]) -> None:
    """Log a warning that names the held-out problems among the training prompts, if there are."""
    found = overlapping(training, held_out)
    if not found:
        return
    listed = ", ".join(f"{prompt.messages[-1][1]!r:.60}" for prompt in found[:MAX_LISTED])
    more = f" and {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else ""
    logger.warning(
        "%d of %d held-out problems are among the training prompts, so their accuracy says "
        "nothing of other problems: %s%s",
        *(len(found), len(held_out), listed, more),
    )


def _key(prompt: Prompt) -> str:
    """What the user asks; a system message is the same for all."""
    asked = [content for role, content in prompt.messages if role != "system"]
    return normalised("\n".join(asked))
