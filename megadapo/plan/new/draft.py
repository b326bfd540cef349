"""A recipe in the making: its keys, the reason for each value, and its text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from megadapo.config import RunConfig, from_dict
from megadapo.config.problems import section_of
from megadapo.config.recipe import KeyPath, parse_override, toml_value, with_key
from megadapo.section import Section


class Draft:
    """The keys of a recipe, each with the reason for its value."""

    def __init__(self, overrides: Sequence[str] = ()) -> None:
        """`overrides`: keys that the user gives; no rule changes them."""
        self._given = {keys: value for keys, value, _ in map(parse_override, overrides)}
        self._values: dict[KeyPath, Any] = dict(self._given)
        self._reasons = dict.fromkeys(self._given, "given")

    def set(self, key: str, value: Any, reason: str = "") -> Any:
        """Set a dotted key unless the user gave it; return its value."""
        keys = tuple(key.split("."))
        if keys not in self._given:
            self._values[keys], self._reasons[keys] = value, reason
        return self._values[keys]

    def config(self, changes: Mapping[str, Any] | None = None) -> RunConfig:
        """Return the checked recipe, with changes of keys that the user did not give."""
        table: dict[str, Any] = {}
        changed = {tuple(key.split(".")): value for key, value in (changes or {}).items()}
        for keys, value in (self._values | changed | self._given).items():
            table = with_key(table, keys, value)
        return from_dict(table)

    def text(self, head: Sequence[str]) -> str:
        """Return the recipe as TOML below comments; keys with their default value are left out."""
        lines, section = [part for line in head for part in _comment(line)], KeyPath()
        order = list(RunConfig.model_fields)
        for keys in sorted(self._values, key=lambda keys: (order.index(keys[0]), keys[:-1])):
            if (value := self._values[keys]) == _default(keys):
                continue
            if keys[:-1] != section:
                section = keys[:-1]
                lines += ["", f"[{'.'.join(section)}]"]
            lines += [*_comment(self._reasons[keys]), f"{keys[-1]} = {toml_value(value)}"]
        return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, 98)]


def _default(keys: KeyPath) -> Any:
    section: type[Section] | None = RunConfig
    for name in keys[:-1]:
        section = section and section_of(section.model_fields[name])
    return section and section.model_fields[keys[-1]].default
