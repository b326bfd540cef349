"""Answers that are not given to the computer algebra system, by their look.

The wall-clock limit would stop them too, but only after it has passed and at the price of a
worker; a policy that learns to write such answers would slow every step down.
"""

from __future__ import annotations

import re

MAX_CHARS = 512
MAX_DEPTH = 12
"""Nested brackets; the LaTeX parser's time grows exponentially with them."""

_REFUSED = (
    (re.compile(r"\d{41}"), "a number of more than 40 digits"),
    (re.compile(r"(\^|\*\*)[({\s]*[-+]?\s*\d{4}"), "an exponent of four or more digits"),
    (re.compile(r"[)\]}]\s*(\^|\*\*)[({\s]*\d{3}"), "a large power of an expression"),
    (re.compile(r"\d[\s})]*(\^|\*\*)[({\s]*\d+[\s})]*(\^|\*\*)"), "a power of a power"),
    (re.compile(r"\d{3}[\s)}\]]*!|![\s)}\]]*!"), "a large or repeated factorial"),
    (re.compile(r"\\(sum|prod|int|lim|[dt]?binom|bigcup|bigcap)"), "a long computation"),
    (re.compile(r"[\x00-\x08\x0e-\x1f\x7f]"), "control characters"),
)


def refusal(text: str) -> str | None:
    """Say why an answer is not compared symbolically, or None if it may be."""
    if len(text) > MAX_CHARS:
        return f"more than {MAX_CHARS} characters"
    if _depth(text) > MAX_DEPTH:
        return f"brackets nested more than {MAX_DEPTH} deep"
    return next((reason for pattern, reason in _REFUSED if pattern.search(text)), None)


def _depth(text: str) -> int:
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return deepest
