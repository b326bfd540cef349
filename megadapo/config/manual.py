"""The manual of the configuration: every key as a table row, as Markdown and in a JSON schema.

Types, defaults and descriptions come from the sections themselves.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from megadapo.config.problems import section_of
from megadapo.config.recipe import toml_value
from megadapo.config.run_config import RunConfig
from megadapo.errors import ConfigError
from megadapo.section import NONE_TEXT, Section

_TYPES = {
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "string": "str",
    "object": "table",
}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}

_INTRODUCTION = """\
# Configuration

A run is described by one TOML file with these sections. Any key can be set on the command line:
`megadapo train configs/quickstart.toml --trainer.optimizer.lr=2e-5`. A value on the command line is
read as TOML, or as plain text if it is not valid TOML. With `extends = "other.toml"` a file states
only its differences from another one. TOML has no null; `"none"` stands for it, and removes an
inherited source of `data.train` or `data.held_out`. Input files and folders are looked up in the
working folder and beside the recipe.

`megadapo train CONFIG --dry-run` checks everything and prints the resolved configuration. `megadapo
config SECTION` shows these tables in the terminal. `megadapo config --schema` prints
`configs/schema.json`, which editors use to complete keys; recipes name it in their first line.

This page is written by `megadapo config --markdown`.
"""


@dataclass(frozen=True)
class KeyRow:
    """One field of a section."""

    name: str
    type: str
    default: str
    """Default value as TOML; empty for a required field."""
    description: str


Table: TypeAlias = tuple[str, str, list[KeyRow]]
"""Name and description of a section, and its fields."""


def tables(name: str | None = None) -> list[Table]:
    """Return the tables of a section and its sub-sections, or of all sections.

    Raises:
        ConfigError: the section does not exist; the message names the nearest one.
    """
    sections = dict(_sections(RunConfig, ""))
    if name is None:
        return [_table(dotted, section) for dotted, section in sections.items()]
    if name not in sections:
        near = difflib.get_close_matches(name, sections, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sections)}"
        raise ConfigError(f"{name}: unknown section; {hint}")
    return [
        _table(dotted, section)
        for dotted, section in sections.items()
        if dotted == name or dotted.startswith(f"{name}.")
    ]


def markdown() -> str:
    """Return the text of docs/configuration.md."""
    blocks = [_INTRODUCTION]
    for name, description, rows in tables():
        lines = ["| key | type | default | |", "| --- | --- | --- | --- |"]
        for row in rows:
            default = f"`{row.default}`" if row.default else "required"
            cells = (f"`{row.name}`", f"`{row.type}`", default, row.description)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        blocks.append("\n".join([f"## [{name}]", "", description, "", *lines, ""]))
    return "\n".join(blocks)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe, for editors.

    No key is required, because a recipe may extend another one.
    """
    schema = RunConfig.model_json_schema(schema_generator=_RecipeSchema)
    for section in (schema, *schema["$defs"].values()):
        section.pop("required", None)
    extends = {"type": "string", "description": "Another recipe that this one is based on."}
    schema["properties"] = {"extends": extends} | schema["properties"]
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}


class _RecipeSchema(GenerateJsonSchema):
    """A schema for TOML: without null, and without titles that repeat the key."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return {"anyOf": [self.generate_inner(schema["schema"]), {"const": NONE_TEXT}]}

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        described = super().default_schema(schema)
        if isinstance(described.get("default"), dict):
            del described["default"]  # a section's fields have their own defaults
        elif described.get("default", NONE_TEXT) is None:
            described["default"] = NONE_TEXT
        return described

    def field_title_should_be_set(self, schema: object) -> bool:
        return False


def _sections(section: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    for name, field in section.model_fields.items():
        if (inner := section_of(field)) is not None:
            yield prefix + name, inner
            yield from _sections(inner, f"{prefix}{name}.")


def _table(dotted: str, section: type[Section]) -> Table:
    properties = section.model_json_schema(schema_generator=_RecipeSchema)["properties"]
    rows = []
    for name, field in section.model_fields.items():
        if section_of(field) is None:
            default = "" if field.is_required() else toml_value(field.default)
            kind = _type_text(properties[name])
            rows.append(KeyRow(name, kind, default, _one_line(field.description)))
    return dotted, _one_line(section.__doc__), rows


def _type_text(schema: JsonSchemaValue) -> str:
    if "anyOf" in schema:
        return " | ".join(_type_text(member) for member in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return " | ".join(toml_value(value) for value in schema.get("enum", [schema.get("const")]))
    if schema["type"] == "array":
        return f"list of {_type_text(schema['items'])}"
    kind = schema.get("format", _TYPES[schema["type"]])
    bounds = [f"{sign} {schema[key]:.15g}" for key, sign in _BOUNDS.items() if key in schema]
    return f"{kind} {', '.join(bounds)}".rstrip()


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
