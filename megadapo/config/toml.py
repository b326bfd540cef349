"""A configuration as TOML text that `load_config` reads back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megadapo.section import NONE_TEXT, Section


def to_toml(config: Section) -> str:
    """Return a section with all below it as TOML; None is written as "none"."""
    return "\n".join(_lines(config.model_dump(mode="json"), "")).strip() + "\n"


def _lines(table: Mapping[str, Any], name: str) -> Iterator[str]:
    keys = [key for key, value in table.items() if not isinstance(value, dict)]
    if name and keys:
        yield ""
        yield f"[{name}]"
    for key in keys:
        yield f"{key} = {toml_value(table[key])}"
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _lines(value, f"{name}.{key}" if name else key)


_ESCAPES = {code: f"\\u{code:04x}" for code in (*range(0x20), 0x7F)}
_ESCAPES |= {ord("\\"): "\\\\", ord('"'): '\\"', ord("\n"): "\\n", ord("\t"): "\\t"}


def toml_value(value: object) -> str:
    """Return one plain value as TOML."""
    if value is None:
        return f'"{NONE_TEXT}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.translate(_ESCAPES) + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_value(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    return repr(value)
