"""The runs of an ablation: each row with each seed, its configuration, folder and command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megadapo.config import RunConfig, load_config, to_dict
from megadapo.config.preflight import check_run
from megadapo.config.recipe import RESOLVED_FILE, parse_override
from megadapo.errors import ConfigError, MegadapoError
from megadapo.lab.ablation.rows import OWN_KEYS, Row, RowsFile, arguments, flat
from megadapo.observe.metrics.records import read_metrics
from megadapo.run.state.checkpoint import CHECKPOINTS, CheckpointStore

Standing = Literal["new", "begun", "finished"]

MAX_LISTED = 4
"""Differing keys that a message names."""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One row with one seed."""

    row: Row
    config: RunConfig
    recipe: str
    """What `megadapo train` is given."""
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
        """What its process says."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "megadapo.cli", "train", self.recipe, *self.overrides]

    def standing(self) -> Standing:
        """How far the run has come in its folder."""
        if not (self.folder / RESOLVED_FILE).is_file():
            return "new"
        steps = CheckpointStore(self.folder / CHECKPOINTS, keep=1).steps()
        wanted = self.config.run.num_steps
        recorded = read_metrics(self.folder)
        done = bool(steps) and steps[-1] >= wanted and len(recorded) >= wanted
        return "finished" if done else "begun"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An ablation before it begins."""

    config: str
    """Recipe that the rows vary."""
    rows_file: Path
    rows: RowsFile
    seeds: tuple[int, ...]
    folder: Path
    runs: tuple[PlannedRun, ...]
    """Seed by seed, so that an early stop leaves whole comparisons."""

    def of_row(self, row: Row) -> list[PlannedRun]:
        return [run for run in self.runs if run.row == row]


def plan_ablation(
    config: str,
    rows_file: Path,
    rows: RowsFile,
    *,
    num_seeds: int,
    folder: Path,
    overrides: Sequence[str] = (),
) -> Plan:
    """Resolve and check every run before the first one starts.

    Args:
        overrides: `--section.key=value` of all runs; they go before what the file shares.

    Raises:
        ConfigError: a row's configuration is wrong, an override sets what makes the rows differ,
            or a folder holds a run of another configuration.
        MegadapoError: what a recipe points at cannot be used.
    """
    plan_row = partial(_plan_run, config, rows_file, rows, folder)
    for number, override in enumerate(overrides):
        others = [*overrides[:number], *overrides[number + 1 :]]
        _check_override(override, [partial(plan_row, n, 0, others) for n in range(len(rows.row))])
    first_seed = load_config(config, list(overrides)).run.seed
    seeds = tuple(range(first_seed, first_seed + num_seeds))
    runs = [plan_row(index, seed, overrides) for seed in seeds for index in range(len(rows.row))]
    for run in runs[: len(rows.row)]:
        _checked(run)
    for run in runs:
        _check_folder(run)
    return Plan(
        config=config,
        rows_file=rows_file,
        rows=rows,
        seeds=seeds,
        folder=folder,
        runs=tuple(runs),
    )


def _check_override(override: str, without: Sequence[Callable[[], PlannedRun]]) -> None:
    """Refuse an override of what the ablation sets, or of what rows are compared in.

    Args:
        without: makes each row's run without it.
    """
    key = ".".join(parse_override(override)[0])
    if key in OWN_KEYS and key != "run.seed":
        raise ConfigError(f"{override}: {key} is set by the ablation itself; see --folder")
    # a row that cannot run without it says so itself, or has no value to lose
    rows = [values for plan in without if (values := _values(plan, key))]
    names = {name for row in rows for name in row}
    differing = sorted(n for n in names if any(row.get(n) != rows[0].get(n) for row in rows))
    if differing:
        raise ConfigError(
            f"{override}: rows differ in {', '.join(differing[:MAX_LISTED])}, so it cannot be set "
            "for all"
        )


def _values(plan: Callable[[], PlannedRun], key: str) -> dict[str, Any]:
    """A row's values of a key, or of all below it; none where its configuration is refused."""
    try:
        values = flat(to_dict(plan().config))
    except ConfigError:
        return {}
    return {name: value for name, value in values.items() if f"{name}.".startswith(f"{key}.")}


def _plan_run(
    config: str,
    rows_file: Path,
    rows: RowsFile,
    folder: Path,
    index: int,
    seed: int,
    overrides: Sequence[str],
) -> PlannedRun:
    row = rows.row[index]
    recipe = config if row.config is None else str(rows_file.parent / row.config)
    own = {"run": {"folder": str(folder / row.folder_name / f"seed-{seed}"), "seed": seed}}
    words = (
        *arguments(rows.overrides_of(index)),
        *overrides,
        *arguments(own),
        "--run.resume=auto",
    )
    try:
        resolved = load_config(recipe, words)
    except ConfigError as error:
        raise ConfigError(f"{rows_file}, row {row.name!r}: {error}") from None
    return PlannedRun(row=row, config=resolved, recipe=recipe, overrides=words)


def _checked(run: PlannedRun) -> None:
    try:
        check_run(run.config)
    except MegadapoError as error:
        raise type(error)(f"row {run.row.name!r}: {error}") from None


def _check_folder(run: PlannedRun) -> None:
    """What a folder holds must be of this configuration: nothing else may enter the table."""
    if run.standing() == "new":
        return
    found = flat(to_dict(load_config(run.folder)))
    wanted = flat(to_dict(run.config))
    other = [key for key in wanted if found.get(key) != wanted[key] and key != "run.resume"]
    if other:
        shown = ", ".join(
            f"{key} = {found.get(key)}, not {wanted[key]}" for key in other[:MAX_LISTED]
        )
        raise ConfigError(
            f"{run.folder} holds a run of another configuration ({shown}): choose another "
            "--folder, or delete it"
        )
