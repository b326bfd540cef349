"""The whole configuration of a run: every section, and the checks that need more than one.

Each section is a frozen dataclass beside what it configures. Importing this module starts nothing
and imports no torch, Ray, vLLM or Megatron, so `--dry-run` answers at once.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megadapo.checkpoint import CheckpointConfig
from megadapo.cluster import ClusterConfig
from megadapo.dapo.config import DapoConfig
from megadapo.data.config import DataConfig
from megadapo.errors import ConfigError
from megadapo.observe.oracles import OracleConfig
from megadapo.schema import OverrideValue, build, known_keys, to_dict, to_toml
from megadapo.trainer.config import ModelConfig, TrainerConfig
from megadapo.weights.config import WeightsConfig

__all__ = [
    "RunConfig",
    "RunSection",
    "from_dict",
    "known_keys",
    "load_config",
    "parse_override",
    "to_dict",
    "to_toml",
]


RESOLVED_FILE = "config.json"
"""The resolved configuration in a run's folder."""


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """Which run this is: where it is kept, how long it is, and where it starts."""

    folder: Path
    """Run folder for metrics, logs and checkpoints, relative to the current directory."""
    num_steps: int
    """Number of rollout steps of the whole run, those before a resume included."""
    seed: int = 0
    """Seed of everything random: prompt order, sampling and a random initialisation."""
    resume: str = "auto"
    """"auto": newest complete checkpoint if there is one; "never": start anew; else its path."""

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ConfigError(f"run.num_steps = {self.num_steps} must be at least 1")
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"run.seed = {self.seed} must be in [0, 2**31)")
        if not self.resume:
            raise ConfigError('run.resume must be "auto", "never" or the path of a checkpoint')


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides what a run does."""

    run: RunSection
    model: ModelConfig
    data: DataConfig
    dapo: DapoConfig = field(default_factory=DapoConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    oracles: OracleConfig = field(default_factory=OracleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        problems = [problem for check in CROSS_CHECKS for problem in check(self)]
        if problems:
            raise ConfigError("\n".join(problems))


CROSS_CHECKS = ()


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML recipe, apply `section.key=value` overrides, and check all of it.

    Where `path` is a run's folder, its resolved `config.json` is read.
    Raises ConfigError that names the file and lists every problem with its dotted key.
    """
    path = Path(path)
    path = path / RESOLVED_FILE if path.is_dir() else path
    table = _read_json(path) if path.suffix == ".json" else _read_recipe(path, ())
    for override in overrides:
        keys, value = parse_override(override)
        _set_key(table, keys, value)
    try:
        return build(RunConfig, table)
    except ConfigError as error:
        raise ConfigError(_with_source(str(error), path, overrides)) from None


def from_dict(table: Mapping[str, Any]) -> RunConfig:
    """Make a RunConfig from the nested plain values that `to_dict` returns."""
    return build(RunConfig, table)


def parse_override(text: str) -> tuple[tuple[str, ...], OverrideValue]:
    """Split `section.key=value` (leading dashes allowed) into its key path and value."""
    name, equals, value = text.removeprefix("--").partition("=")
    keys = tuple(name.split("."))
    if not equals or len(keys) < 2 or not all(keys):
        raise ConfigError(f"{text!r} is not an override; write --section.key=value")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    # A value with a line break could define further keys: then it is plain text.
    single = parsed.keys() == {"value"}
    return keys, OverrideValue(text=value, parsed=parsed["value"] if single else value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: expected an object with the sections of a configuration")
    return table


def _read_recipe(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """Read one TOML file, laid over the file that its `extends` names, if any."""
    table = _read_toml(path)
    if "extends" not in table:
        return table
    base = table.pop("extends")
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{path}: extends: expected the name of another TOML file")
    seen = (*seen, path.resolve())
    base_path = path.parent / base
    if base_path.resolve() in seen:
        raise ConfigError(f"{path}: extends {base!r}, which extends this file again")
    return _merge(_read_recipe(base_path, seen), table)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both_tables else value
    return merged


def _set_key(table: dict[str, Any], keys: tuple[str, ...], value: OverrideValue) -> None:
    for depth, key in enumerate(keys[:-1], start=1):
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            dotted = ".".join(keys[:depth])
            raise ConfigError(f"--{'.'.join(keys)}: {dotted} is a value, not a section")
    table[keys[-1]] = value


def _with_source(problems: str, path: Path, overrides: Sequence[str]) -> str:
    lines = problems.splitlines()
    source = f"{path} with its overrides" if overrides else str(path)
    if len(lines) == 1:
        return f"{source}: {lines[0]}"
    return "\n".join([f"{source}: {len(lines)} problems", *(f"  {line}" for line in lines)])
