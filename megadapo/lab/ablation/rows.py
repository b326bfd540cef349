"""The rows of an ablation, as a TOML file lists them, and their runs: each row with each seed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from megadapo.config import RunConfig, load_config, to_dict
from megadapo.config.preflight import check_run
from megadapo.config.recipe import merge_tables, parse_override, read_toml, toml_value
from megadapo.errors import ConfigError, MegadapoError
from megadapo.lab.ablation.measures import MEASURES
from megadapo.observe.run_records import RESOLVED_FILE, RunRecords, leaves
from megadapo.run.state.checkpoint import checkpoints_of
from megadapo.section import Section

OWN_KEYS = ("run.folder", "run.seed", "run.resume")
"""Keys that the ablation sets for each run."""
MAX_LISTED = 4
"""Limit of the differing keys in a message."""

RunState = Literal["new", "started", "finished"]


class Expectation(Section, title="row.expects"):
    """An expected change against the row that this row is compared with."""

    measure: str
    """Name of a measure, see `lab/ablation/measures.py:MEASURES`."""
    change: Literal["higher", "lower"]
    source: str = ""
    """Publication of the expected change."""

    def conflicts(self) -> Iterator[str]:
        known = [measure.name for measure in MEASURES]
        if self.measure not in known:
            yield f"row.expects.measure: {self.measure!r} is not one of {', '.join(known)}"


class AblationRow(Section, title="row"):
    """A variant of the recipe."""

    name: str
    config: str | None = None
    """Recipe that replaces the command's, relative to the rows file."""
    overrides: dict[str, Any] = {}
    """Nested tables of the row's keys."""
    source: str = ""
    """Publication of the row, and its result there."""
    expects: tuple[Expectation, ...] = ()

    @property
    def folder_name(self) -> str:
        """The name in characters that are safe in a path."""
        return re.sub(r"[^a-z0-9+.-]+", "-", self.name.lower()).strip("+.-")

    def conflicts(self) -> Iterator[str]:
        if not self.folder_name:
            yield f"row.name = {self.name!r} needs a letter or a digit"


class RowsFile(Section, title="rows"):
    """The rows file: shared settings, and the rows in display order."""

    cumulative: bool = False
    """Whether each row adds its overrides to the rows before and is compared with the previous one.
    Otherwise every row is independent and compared with the first."""
    accuracy: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """Held-out accuracy that ends the count of steps."""
    overrides: dict[str, Any] = {}
    """Overrides of all rows; a row's own ones win."""
    row: Annotated[tuple[AblationRow, ...], Field(min_length=1)]

    def conflicts(self) -> Iterator[str]:
        names = [row.folder_name for row in self.row]
        for name in {name for name in names if names.count(name) > 1}:
            yield f"rows: {names.count(name)} rows share the folder name {name!r}: rename them"
        if self.cumulative and any(row.config is not None for row in self.row):
            yield "rows: with cumulative = true a row adds to the previous one and takes no config"
        tables = [self.overrides, *(row.overrides for row in self.row)]
        for key in {key for table in tables for key, _ in leaves(table)} & {*OWN_KEYS}:
            yield f"rows: {key} is set by the ablation itself; remove it"

    def overrides_of(self, index: int) -> dict[str, Any]:
        """Return nested tables of the keys that the file sets for one row."""
        merged = self.overrides
        for row in self.row[0 if self.cumulative else index : index + 1]:
            merged = merge_tables(merged, row.overrides)
        return merged

    @property
    def comparisons(self) -> list[tuple[str, str]]:
        """Pairs of names: (row, the row it is compared with)."""
        names = [row.name for row in self.row]
        if self.cumulative:
            return [(after, before) for before, after in pairwise(names)]
        return [(name, names[0]) for name in names[1:]]


def read_rows(path: Path) -> RowsFile:
    """Read a rows file; ConfigError if it cannot be read or is invalid."""
    table = read_toml(path)
    try:
        return RowsFile.model_validate(table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def arguments(table: dict[str, Any]) -> list[str]:
    """Return nested overrides as command line arguments."""
    return [f"--{key}={toml_value(value)}" for key, value in leaves(table)]


@dataclass(frozen=True, kw_only=True)
class RowRun:
    """One row with one seed."""

    row: AblationRow
    config: RunConfig
    recipe: str
    """Recipe argument of `megadapo train`."""
    overrides: tuple[str, ...]

    @property
    def seed(self) -> int:
        return self.config.run.seed

    @property
    def folder(self) -> Path:
        return self.config.run.folder

    @property
    def name(self) -> str:
        return f"{self.row.name}, seed {self.seed}"

    @property
    def log(self) -> Path:
        """The output of its process."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "megadapo.cli", "train", self.recipe, *self.overrides]

    def state(self) -> RunState:
        """Return the progress of the run in its folder."""
        if not (self.folder / RESOLVED_FILE).is_file():
            return "new"
        wanted = self.config.run.num_steps
        is_saved = max(checkpoints_of(self.folder), default=-1) >= wanted
        done = is_saved and len(RunRecords(self.folder).steps) >= wanted
        return "finished" if done else "started"


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """All runs of an ablation, checked before the first one starts."""

    config: str
    """Recipe that the rows vary."""
    rows_file: Path
    rows: RowsFile
    seeds: tuple[int, ...]
    folder: Path
    runs: tuple[RowRun, ...]
    """Runs ordered by seed, so that an early stop leaves complete comparisons."""

    @classmethod
    def of(
        cls,
        config: str,
        rows_file: Path,
        *,
        num_seeds: int,
        folder: Path,
        overrides: Sequence[str] = (),
    ) -> Ablation:
        """Read the rows, then resolve and check every run.

        Args:
            overrides: `--section.key=value` for all runs; they precede the shared ones of the file.

        Raises:
            ConfigError: a row's configuration is invalid, an override sets a key that differs
                between rows, or a folder holds a run of another configuration.
            MegadapoError: a file or model of a recipe cannot be used.
        """
        rows = read_rows(rows_file)
        run_of = partial(_row_run, config, rows_file, rows, folder)
        indices = range(len(rows.row))
        for number, override in enumerate(overrides):
            others = [*overrides[:number], *overrides[number + 1 :]]
            _check_override(override, [partial(run_of, index, 0, others) for index in indices])
        first_seed = load_config(config, list(overrides)).run.seed
        seeds = tuple(range(first_seed, first_seed + num_seeds))
        runs = [run_of(index, seed, overrides) for seed in seeds for index in indices]
        for run in runs[: len(indices)]:
            try:
                check_run(run.config)
            except MegadapoError as error:
                raise type(error)(f"row {run.row.name!r}: {error}") from None
        for run in runs:
            _check_folder(run)
        return cls(
            config=config,
            rows_file=rows_file,
            rows=rows,
            seeds=seeds,
            folder=folder,
            runs=tuple(runs),
        )


def _row_run(
    config: str,
    rows_file: Path,
    rows: RowsFile,
    folder: Path,
    index: int,
    seed: int,
    overrides: Sequence[str],
) -> RowRun:
    row = rows.row[index]
    recipe = config if row.config is None else str(rows_file.parent / row.config)
    own = {"run": {"folder": str(folder / row.folder_name / f"seed-{seed}"), "seed": seed}}
    words = (*arguments(rows.overrides_of(index)), *overrides, *arguments(own), "--run.resume=auto")
    try:
        resolved = load_config(recipe, words)
    except ConfigError as error:
        raise ConfigError(f"{rows_file}, row {row.name!r}: {error}") from None
    return RowRun(row=row, config=resolved, recipe=recipe, overrides=words)


def _check_override(override: str, without: Sequence[Callable[[], RowRun]]) -> None:
    """Reject an override of a key that the ablation sets or that differs between rows.

    `without` makes each row's run without the override.
    """
    key = ".".join(parse_override(override)[0])
    if key in OWN_KEYS and key != "run.seed":
        raise ConfigError(f"{override}: {key} is set by the ablation itself; see --folder")
    rows = [values for run in without if (values := _values(run, key))]
    names = {name for row in rows for name in row}
    differing = sorted(n for n in names if any(row.get(n) != rows[0].get(n) for row in rows))
    if differing:
        raise ConfigError(
            f"{override}: rows differ in {', '.join(differing[:MAX_LISTED])}, so it cannot be set "
            "for all"
        )


def _values(run: Callable[[], RowRun], key: str) -> dict[str, Any]:
    """Return a row's values of a key, or of all keys below it; {} if its configuration is invalid.

    A row that is invalid without the override has no value to lose, or fails later by itself.
    """
    try:
        values = dict(leaves(to_dict(run().config)))
    except ConfigError:
        return {}
    return {name: value for name, value in values.items() if f"{name}.".startswith(f"{key}.")}


def _check_folder(run: RowRun) -> None:
    """Reject a folder with a run of another configuration: it must not enter the tables."""
    if run.state() == "new":
        return
    found = dict(leaves(to_dict(load_config(run.folder))))
    wanted = dict(leaves(to_dict(run.config)))
    other = [key for key in wanted if found.get(key) != wanted[key] and key != "run.resume"]
    if other:
        shown = ", ".join(
            f"{key} = {found.get(key)}, not {wanted[key]}" for key in other[:MAX_LISTED]
        )
        raise ConfigError(
            f"{run.folder} holds a run of another configuration ({shown}): choose another "
            "--folder, or delete it"
        )
