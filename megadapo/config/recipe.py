"""Recipes as nested tables: reads TOML files and overrides, and writes TOML.

`extends = "other.toml"` (relative to the file) bases a recipe on another one, so a variant states
only its differences. A run's resolved `config.json` is read in the same way.
"""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from os.path import exists
from pathlib import Path
from typing import Any

from megadapo.errors import ConfigError
from megadapo.observe.run_records import RESOLVED_FILE
from megadapo.section import NONE_TEXT, Section

RESUME_TARGET_FILE = "resumed.json"
"""File in a run's folder with the checkpoint that a user named to resume from."""


MAX_BYTES = 1 << 24
"""Largest file of a configuration that is read: a damaged or foreign one may never end."""
KeyPath = tuple[str, ...]
"""A key's names from the outermost table to the key itself."""
INPUT_PATHS: tuple[KeyPath, ...] = (
    ("model", "path"),
    ("critic", "path"),
    ("algorithm", "reference", "path"),
    ("algorithm", "pretraining", "data"),
    ("data", "train"),
    ("data", "held_out"),
    ("data", "columns", "examples"),
)
"""Keys of files and folders that are also looked up beside the recipe."""
CONFIGS = "configs/"
"""Beginning of the paths that are also looked up among the recipes of the package."""


def read_table(
    source: PathLike[str] | str | Mapping[str, Any] | Section, overrides: Sequence[str]
) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Read a recipe, a resolved configuration, a table or a run's folder, with overrides.

    Returns:
        The table, and the texts of the overrides that TOML reads as another type.
    """
    source = source.model_dump(mode="json") if isinstance(source, Section) else source
    if isinstance(source, Mapping):
        table = _with_paths_beside(dict(source), Path())
    elif (path := Path(source)).is_dir():
        # the folder stands for the run, even if its file has another path or run.resume
        table = with_key(_read_json(path / RESOLVED_FILE), ("run", "folder"), str(path))
        table = with_key(table, ("run", "resume"), "auto")
    else:
        path = Path(shipped(str(path)))
        table = _read_json(path) if path.suffix == ".json" else _read_recipe(path, ())
    texts: dict[KeyPath, str] = {}
    for override in overrides:
        keys, value, text = parse_override(override)
        table = with_key(table, keys, value)
        texts.pop(keys, None)
        if not isinstance(value, str):
            texts[keys] = text
    return _without_removed(table), texts


def shipped(path: str) -> str:
    """Return the place in the package of a path below configs/ that does not exist here."""
    in_package = Path(__file__).parents[1] / path
    is_shipped = path.startswith(CONFIGS) and not exists(path) and exists(in_package)
    return str(in_package) if is_shipped else path


def _without_removed(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table without the sources of data that are "none", such as inherited ones."""
    for key in ("train", "held_out"):
        data = table.get("data")
        if isinstance(data, dict) and isinstance(sources := data.get(key), dict):
            kept = {name: one for name, one in sources.items() if one != NONE_TEXT}
            table = with_key(table, ("data", key), kept)
    return table


def parse_override(text: str) -> tuple[KeyPath, object, str]:
    """Split `section.key=value` (leading dashes allowed) into key path, TOML value and text."""
    name, equals, value = text.removeprefix("--").partition("=")
    keys = tuple(name.split("."))
    if not equals or len(keys) < 2 or not all(keys):
        raise ConfigError(f"{text}: not an override; write --section.key=value")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        parsed = {}
    # A value with a line break could define further keys, so it is read as plain text.
    single = parsed.keys() == {"value"}
    return keys, parsed["value"] if single else value, value


def override_texts(overrides: Sequence[str] | Mapping[str, object]) -> Sequence[str]:
    """Return overrides as texts; a mapping has values by dotted key."""
    if not isinstance(overrides, Mapping):
        return overrides
    return [f"{name}={toml_value(value)}" for name, value in overrides.items()]


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
        # a pipe that no process writes would be waited for without end
        if path.is_fifo() and not path.is_relative_to("/dev"):
            raise ConfigError(f"{path}: it is a pipe: name a file")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: it has more than {MAX_BYTES >> 20} MiB: no configuration")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: expected an object with the sections of a configuration")
    return table


def read_toml(path: Path) -> dict[str, Any]:
    """Read one TOML file.

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _read_recipe(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """Read one TOML file on top of the file that its `extends` names, if any."""
    table = _with_paths_beside(read_toml(path), path.parent)
    if "extends" not in table:
        return table
    base = table.pop("extends")
    if not isinstance(base, str) or not base or "\0" in base:
        raise ConfigError(f"{path}: extends: expected the name of another TOML file")
    seen = (*seen, path.resolve())
    base_path = path.parent / base
    if base.startswith(CONFIGS) and not exists(base_path):
        base_path = Path(shipped(base))
    if base_path.resolve() in seen:
        raise ConfigError(f"{path}: extends {base}, which extends this file again")
    return merge_tables(_read_recipe(base_path, seen), table)


def _with_paths_beside(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a recipe in which input paths are valid here, if they are beside the recipe.

    A path that exists in the working folder stays as it is.
    """

    def found(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: found(one) for name, one in value.items()}
        # unlike Path.exists, this takes any text
        if not isinstance(value, str) or exists(value):
            return value
        return str(folder / value) if exists(folder / value) else shipped(value)

    for *sections, key in INPUT_PATHS:
        section: Any = table
        for name in sections:
            section = section.get(name, {}) if isinstance(section, dict) else {}
        if isinstance(section, dict) and key in section:
            table = with_key(table, (*sections, key), found(section[key]))
    return table


def merge_tables(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return `base` updated with the keys of `over`, table by table."""
    merged = dict(base)
    for key, value in over.items():
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge_tables(merged[key], value) if both_tables else value
    return merged


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
    if isinstance(value, str | Path):
        return '"' + str(value).translate(_ESCAPES) + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_value(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    return repr(value)
