"""From a recipe file and the command line to one nested table, before anything is checked.

A recipe is TOML. `extends = "other.toml"` (relative to the file) lays it over another recipe, so a
variant states only its differences. A run's resolved `config.json` is read in the same way.
"""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megadapo.errors import ConfigError

RESOLVED_FILE = "config.json"
"""The resolved configuration in a run's folder."""
RESUME_TARGET_FILE = "resumed.json"
"""File in a run's folder with the checkpoint that a user named to resume from."""


_RENAMED = {"dapo": "algorithm"}
"""Sections by the names that runs were written with, so that a run's folder can still be read."""

KeyPath = tuple[str, ...]
"""The names of a key's tables, and its own."""


def read_table(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Read a recipe, a resolved configuration or the one in a run's folder, with overrides.

    Returns the table, and the texts of those overrides that mean something else as TOML.
    """
    path = path / RESOLVED_FILE if path.is_dir() else path
    table = _read_json(path) if path.suffix == ".json" else _read_recipe(path, ())
    texts: dict[KeyPath, str] = {}
    for override in overrides:
        keys, value, text = parse_override(override)
        table = with_key(table, keys, value)
        texts.pop(keys, None)
        if not isinstance(value, str):
            texts[keys] = text
    return table, texts


def parse_override(text: str) -> tuple[KeyPath, object, str]:
    """Split `section.key=value` (leading dashes allowed) into key path, TOML value and text."""
    name, equals, value = text.removeprefix("--").partition("=")
    keys = tuple(name.split("."))
    if not equals or len(keys) < 2 or not all(keys):
        raise ConfigError(f"{text}: not an override; write --section.key=value")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    # A value with a line break could define further keys: then it is plain text.
    single = parsed.keys() == {"value"}
    return keys, parsed["value"] if single else value, value


def with_key(table: dict[str, Any], keys: KeyPath, value: object) -> dict[str, Any]:
    """Return a copy of the nested table with one key set to `value`."""
    table = copy.deepcopy(table)
    inner = table
    for depth, key in enumerate(keys[:-1], start=1):
        inner = inner.setdefault(key, {})
        if not isinstance(inner, dict):
            dotted = ".".join(keys[:depth])
            raise ConfigError(f"--{'.'.join(keys)}: {dotted} is a value, not a section")
    inner[keys[-1]] = value
    return table


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: expected an object with the sections of a configuration")
    table = {_RENAMED.get(name) or name: section for name, section in table.items()}
    return _without_former_keys(table)


def _without_former_keys(table: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a run was written with and no run reads any more."""
    sampling = table.get("sampling")
    if isinstance(sampling, dict) and "oversampling" in sampling:
        # of rounds that no sampler makes any more, with a reserve that knew no staleness
        kept = {key: sampling[key] for key in sampling.keys() - {"oversampling", "reserve_limit"}}
        table["sampling"] = kept
    algorithm = table.get("algorithm")
    objective = algorithm.get("objective") if isinstance(algorithm, dict) else None
    if isinstance(algorithm, dict) and isinstance(objective, dict) and "kl_kind" in objective:
        # an estimator beside a coefficient that could only be 0
        kept = {key: objective[key] for key in objective.keys() - {"kl_kind"}}
        table["algorithm"] = algorithm | {"objective": kept}
    return table


def read_toml(path: Path) -> dict[str, Any]:
    """Read one TOML file.

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(_read_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _read_recipe(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """Read one TOML file, laid over the file that its `extends` names, if any."""
    table = read_toml(path)
    if "extends" not in table:
        return table
    base = table.pop("extends")
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{path}: extends: expected the name of another TOML file")
    seen = (*seen, path.resolve())
    base_path = path.parent / base
    if base_path.resolve() in seen:
        raise ConfigError(f"{path}: extends {base}, which leads back to this file")
    return merge_tables(_read_recipe(base_path, seen), table)


def merge_tables(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with the keys of `over` laid over it, table by table."""
    merged = dict(base)
    for key, value in over.items():
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge_tables(merged[key], value) if both_tables else value
    return merged
