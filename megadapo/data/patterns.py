"""Regular expressions whose time is linear in the text, however hostile it is.

RE2, which pyarrow has, matches them. It knows neither look-around nor back-references.
"""

from __future__ import annotations

import re

_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|(?P<open>\()(?!\?)", re.S)
"""Escapes, classes and openings of unnamed groups, which RE2 as pyarrow calls it refuses."""


def last_match(pattern: str, text: str) -> str | None:
    """Return the first group, or the whole match, in the last line that the pattern matches.

    None means that no line matches. `check_pattern` finds patterns that cannot be used.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    lines = pa.array(text.encode("utf-8", "replace").decode().split("\n"), pa.large_string())
    found = pc.extract_regex(lines, pattern=_with_names(pattern)).drop_null()
    if len(found) == 0:
        return None
    groups = list(found[-1].as_py().values())
    return str(groups[min(1, len(groups) - 1)])


def check_pattern(key: str, pattern: str) -> str | None:
    """Return the problem of the pattern in a key, None if it can be used."""
    import pyarrow as pa

    try:
        found = last_match(pattern, "")
    except pa.ArrowException as error:
        return f"{key} = {pattern!r} is no regular expression of RE2: {error}"
    return None if found is None else f"{key} = {pattern!r} matches an empty line"


def _with_names(pattern: str) -> str:
    """Return a pattern in a group, whose groups have names."""
    named = _PARTS.sub(
        lambda part: f"(?P<group{part.start()}>" if part["open"] else part[0], pattern
    )
    return f"(?P<whole>{named})"
