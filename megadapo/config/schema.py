"""Strict tables: plain nested mappings (TOML, JSON) to frozen dataclasses and back.

Knows nothing about megadapo's sections. Every problem is reported with its dotted key, and all
problems of a table are collected before anything is raised, so a file is corrected in one go.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from megadapo.errors import ConfigError

NONE_TEXT = "none"
"""TOML has no null: this word stands for it where the field's type allows None."""

T = TypeVar("T")


@dataclass(frozen=True)
class OverrideValue:
    """A command-line value: its text, and what the text means when read as TOML."""

    text: str
    parsed: object


class _Mismatch(Exception):
    """A value does not fit the type of its field; the text says what was expected and found."""


def build(cls: type[T], table: Mapping[str, object]) -> T:
    """Make the dataclass `cls` from a nested table.

    Raises ConfigError that lists every unknown key, wrong type, missing key and refused value.
    """
    problems: list[str] = []
    instance = _build_table(cls, table, "", _Schema(cls), problems)
    if problems:
        raise ConfigError("\n".join(problems))
    assert isinstance(instance, cls)
    return instance


def to_dict(config: object) -> dict[str, Any]:
    """Return the nested plain values of a dataclass: only what JSON can hold."""
    assert dataclasses.is_dataclass(config)
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def to_toml(config: object) -> str:
    """Return the dataclass as TOML that `build` reads back; None is written as "none"."""
    return "\n".join(_toml_lines(to_dict(config), "")).strip() + "\n"


def known_keys(cls: type) -> list[str]:
    """Return the dotted name of every key below a dataclass, in order of definition."""
    return list(_walk(cls, ""))


class _Schema:
    """All dotted keys of the root dataclass, for naming the key that was probably meant."""

    def __init__(self, root: type) -> None:
        self.keys = known_keys(root)

    def unknown(self, dotted: str, siblings: list[str]) -> str:
        kind = "section" if "." not in dotted else "key"
        parent, _, name = dotted.rpartition(".")
        meant = self._meant(parent, name, siblings)
        if meant is not None:
            return f"{dotted}: unknown {kind}; did you mean {meant}?"
        return f"{dotted}: unknown {kind}; known here: {', '.join(siblings)}"

    def _meant(self, parent: str, name: str, siblings: list[str]) -> str | None:
        prefix = f"{parent}." if parent else ""
        near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.75)
        if near:
            return prefix + near[0]
        elsewhere = [key for key in self.keys if key.rpartition(".")[2] == name]
        if elsewhere:
            return " or ".join(elsewhere)
        near = difflib.get_close_matches(name, siblings, n=1)
        if near:
            return prefix + near[0]
        near = difflib.get_close_matches(name, [key.rpartition(".")[2] for key in self.keys], n=1)
        return next((key for key in self.keys if near and key.endswith(f".{near[0]}")), None)


def _walk(cls: type, prefix: str) -> Iterator[str]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        yield prefix + field.name
        inner = _dataclass_of(hints[field.name])
        if inner is not None:
            yield from _walk(inner, f"{prefix}{field.name}.")


def _dataclass_of(annotation: object) -> type | None:
    """Return the dataclass behind `D` or `D | None`, else None."""
    for member in _union_members(annotation):
        if dataclasses.is_dataclass(member) and isinstance(member, type):
            return member
    return None


def _union_members(annotation: object) -> tuple[object, ...]:
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _build_table(
    cls: type, table: Mapping[str, object], prefix: str, schema: _Schema, problems: list[str]
) -> object | None:
    """Build one table; on any problem append to `problems` and return None."""
    before = len(problems)
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    problems.extend(schema.unknown(prefix + k, list(fields)) for k in table if k not in fields)
    values: dict[str, object] = {}
    for name, field in fields.items():
        dotted = prefix + name
        inner = _dataclass_of(hints[name])
        value = table[name] if name in table else _absent(field, inner)
        if value is _MISSING:
            problems.append(f"{dotted}: required, but missing")
        elif inner is not None and isinstance(value, Mapping):
            values[name] = _build_table(inner, value, f"{dotted}.", schema, problems)
        elif value is not _DEFAULT:
            try:
                values[name] = _convert(value, hints[name])
            except _Mismatch as mismatch:
                problems.append(f"{dotted}: {mismatch}")
    if len(problems) > before:
        return None
    try:
        return cls(**values)
    except ConfigError as error:
        problems.append(str(error))
        return None


_MISSING = object()
_DEFAULT = object()


def _absent(field: dataclasses.Field[Any], inner: type | None) -> object:
    """Return what stands for a key that the table does not have."""
    has_default = (
        field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    )
    if has_default:
        return _DEFAULT
    # An absent section still names its own required keys, not just itself.
    return {} if inner is not None else _MISSING


def _convert(value: object, annotation: object) -> object:
    """Return `value` as the annotation wants it, or raise _Mismatch."""
    if isinstance(value, OverrideValue):
        return _convert_override(value, annotation)
    members = _union_members(annotation)
    if type(None) in members and (value is None or value == NONE_TEXT):
        return None
    for member in members:
        try:
            return _convert_member(value, member)
        except _Mismatch:
            if len(members) == 1:
                raise
    raise _Mismatch(f"expected {_describe(annotation)}, found {_found(value)}")


def _convert_override(value: OverrideValue, annotation: object) -> object:
    """Read the value as TOML; where that does not fit, as the text it is (a folder named 7)."""
    try:
        return _convert(value.parsed, annotation)
    except _Mismatch as mismatch:
        if isinstance(value.parsed, str):
            raise
        try:
            return _convert(value.text, annotation)
        except _Mismatch:
            raise mismatch from None


def _convert_member(value: object, annotation: object) -> object:
    origin = typing.get_origin(annotation)
    if origin is Literal:
        choices = typing.get_args(annotation)
        for choice in choices:
            if type(choice) is type(value) and choice == value:
                return choice
    elif origin is tuple and isinstance(value, list | tuple):
        return _convert_tuple(value, annotation)
    elif origin is dict and isinstance(value, Mapping):
        key_type, item_type = typing.get_args(annotation)
        return {_convert(k, key_type): _convert(v, item_type) for k, v in value.items()}
    elif annotation is Path and isinstance(value, str):
        if value:
            return Path(value)
        raise _Mismatch("expected a path, found an empty string")
    elif annotation is float and isinstance(value, int | float) and not isinstance(value, bool):
        return _finite(value)
    elif annotation in (bool, int, str) and type(value) is annotation:
        return value
    raise _Mismatch(f"expected {_describe(annotation)}, found {_found(value)}")


def _convert_tuple(value: list[object] | tuple[object, ...], annotation: object) -> object:
    item_types = typing.get_args(annotation)
    if len(item_types) == 2 and item_types[1] is Ellipsis:
        item_types = (item_types[0],) * len(value)
    if len(item_types) != len(value):
        raise _Mismatch(f"expected {len(item_types)} entries, found {len(value)}")
    items = []
    for index, (item, item_type) in enumerate(zip(value, item_types, strict=True)):
        try:
            items.append(_convert(item, item_type))
        except _Mismatch as mismatch:
            raise _Mismatch(f"entry {index}: {mismatch}") from None
    return tuple(items)


def _finite(value: int | float) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _Mismatch("expected a finite number, found " + ("nan" if number != number else "inf"))
    return number


def _describe(annotation: object) -> str:
    members = _union_members(annotation)
    if len(members) > 1:
        return " or ".join(_describe(m) for m in members)
    if annotation is type(None):
        return f'"{NONE_TEXT}"'
    if typing.get_origin(annotation) is Literal:
        return "one of " + ", ".join(_toml_value(c) for c in typing.get_args(annotation))
    if typing.get_origin(annotation) is tuple:
        return "a list of " + _describe(typing.get_args(annotation)[0])
    if annotation is Path:
        return "a path"
    if dataclasses.is_dataclass(annotation) or typing.get_origin(annotation) is dict:
        return "a table"
    return getattr(annotation, "__name__", str(annotation))


def _found(value: object) -> str:
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, str | bool | int | float):
        text = _toml_value(value)
        return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
    return type(value).__name__


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _toml_lines(table: Mapping[str, Any], name: str) -> Iterator[str]:
    keys = [key for key, value in table.items() if not isinstance(value, dict)]
    if name and keys:
        yield ""
        yield f"[{name}]"
    for key in keys:
        yield f"{key} = {_toml_value(table[key])}"
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _toml_lines(value, f"{name}.{key}" if name else key)


_TOML_ESCAPES = {code: f"\\u{code:04x}" for code in (*range(0x20), 0x7F)}
_TOML_ESCAPES |= {ord("\\"): "\\\\", ord('"'): '\\"', ord("\n"): "\\n", ord("\t"): "\\t"}


def _toml_value(value: object) -> str:
    if value is None:
        return f'"{NONE_TEXT}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.translate(_TOML_ESCAPES) + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return repr(value)
