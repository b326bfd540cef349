"""The rows of an ablation: named sets of keys, as a TOML file lists them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from megadapo.config.recipe import merge_tables, read_toml
from megadapo.config.toml import toml_value
from megadapo.errors import ConfigError
from megadapo.lab.ablation.measures import MEASURES
from megadapo.section import Section

OWN_KEYS = ("run.folder", "run.seed", "run.resume")
"""What the ablation itself decides of each run."""


class Expectation(Section, title="row.expects"):
    """What a row is said to change against the row it is compared with."""

    measure: str
    """Name of a measure, see `lab/ablation/measures.py:MEASURES`."""
    change: Literal["higher", "lower"]
    source: str = ""
    """Who says so, and where."""

    def conflicts(self) -> Iterator[str]:
        known = [measure.name for measure in MEASURES]
        if self.measure not in known:
            yield f"row.expects.measure: {self.measure!r} is none of {', '.join(known)}"


class Row(Section, title="row"):
    """One variant."""

    name: str
    config: str | None = None
    """Recipe in the place of the command's, relative to the file of the rows."""
    overrides: dict[str, Any] = {}
    """Nested tables of the keys that the row sets."""
    source: str = ""
    """Where the row comes from, and what was found there."""
    expects: tuple[Expectation, ...] = ()

    @property
    def folder_name(self) -> str:
        """The name as a folder can have it."""
        return re.sub(r"[^a-z0-9+.-]+", "-", self.name.lower()).strip("+.-")

    def conflicts(self) -> Iterator[str]:
        if not self.folder_name:
            yield f"row.name = {self.name!r} needs a letter or a digit"


class RowsFile(Section, title="rows"):
    """The file: what all rows share, and the rows in the order they are shown."""

    cumulative: bool = False
    """Each row adds its overrides to those of the rows before and is compared with the one before;
    otherwise every row is on its own and compared with the first."""
    accuracy: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """Held-out accuracy to which steps are counted."""
    overrides: dict[str, Any] = {}
    """What all rows set, before their own."""
    row: Annotated[tuple[Row, ...], Field(min_length=1)]

    def conflicts(self) -> Iterator[str]:
        names = [row.folder_name for row in self.row]
        for name in {name for name in names if names.count(name) > 1}:
            yield f"rows: {names.count(name)} rows would be kept in a folder {name!r}: rename them"
        if self.cumulative and any(row.config is not None for row in self.row):
            yield "rows: with cumulative = true a row adds to the one before, so none has a config"
        tables = [self.overrides, *(row.overrides for row in self.row)]
        for key in {key for table in tables for key in flat(table)} & {*OWN_KEYS}:
            yield f"rows: {key} is set by the ablation itself; leave it out"

    def overrides_of(self, index: int) -> dict[str, Any]:
        """Nested tables of the keys that the file sets for one row."""
        merged = self.overrides
        for row in self.row[0 if self.cumulative else index : index + 1]:
            merged = merge_tables(merged, row.overrides)
        return merged

    @property
    def comparisons(self) -> list[tuple[str, str]]:
        """(row, the row it is compared with), by name."""
        names = [row.name for row in self.row]
        if self.cumulative:
            return [(after, before) for before, after in pairwise(names)]
        return [(name, names[0]) for name in names[1:]]


def read_rows(path: Path) -> RowsFile:
    """Read the file of the rows.

    Raises:
        ConfigError: it cannot be read, or says what cannot be.
    """
    table = read_toml(path)
    try:
        return RowsFile.model_validate(table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of nested tables by dotted key."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        inner = flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        values |= inner
    return values


def arguments(table: dict[str, Any]) -> list[str]:
    """The overrides as the command line takes them."""
    return [f"--{key}={toml_value(value)}" for key, value in flat(table).items()]
