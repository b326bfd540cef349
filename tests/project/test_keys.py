"""Every key of the configuration has a user: a recipe, an example, or a page that sets it."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
BLOCK = re.compile(r"^```(?:toml|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)
OPTION = re.compile(r"--([a-z_]+(?:\.[a-z_]+)+)")


def keys_of(schema: dict[str, Any], node: dict[str, Any], before: str = "") -> Iterator[str]:
    """Yield the dotted keys of a schema, a list of tables as one."""
    for name, value in node.get("properties", {}).items():
        inner = value["allOf"][0] if "allOf" in value else value
        if "$ref" in inner:
            inner = schema["$defs"][inner["$ref"].rpartition("/")[2]]
        if inner.get("properties"):
            yield from keys_of(schema, inner, f"{before}{name}.")
        else:
            yield before + name


def set_in(table: dict[str, Any], before: str = "") -> Iterator[str]:
    for name, value in table.items():
        yield before + name
        if isinstance(value, dict):
            yield from set_in(value, f"{before}{name}.")


def test_every_key_has_a_user():
    """A key that no recipe, example or page sets is an option without a user."""
    schema = json.loads((REPOSITORY / "configs/schema.json").read_text())
    used: set[str] = set()
    for folder in ("configs", "examples", "benchmarks"):
        for path in (REPOSITORY / folder).rglob("*.toml"):
            text = path.read_text()
            # an ablation sets keys by their dotted names
            used |= {*set_in(tomllib.loads(text)), *re.findall(r"[a-z_]+(?:\.[a-z_]+)+", text)}
    for page in PAGES:
        if page.name != "configuration.md":
            for block in BLOCK.findall(page.read_text()):
                used |= {*OPTION.findall(block)}
                try:
                    used |= {*set_in(tomllib.loads(block))}
                except tomllib.TOMLDecodeError:
                    continue
    assert [key for key in keys_of(schema, schema) if key not in used] == []
