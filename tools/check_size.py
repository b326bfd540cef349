"""Check that the product does not grow: python tools/check_size.py

`[tool.megadapo.size]` in pyproject.toml has a limit for each count. A change that makes a count
smaller lowers its limit; one that needs a larger limit raises it in a commit that says why.
"""

from __future__ import annotations

import ast
import json
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import grimp

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Print every count beside its limit; return 1 if one is larger."""
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["megadapo"]["size"]
    counts = count_product() | {
        "keys": count_keys(json.loads((ROOT / "configs/schema.json").read_text())),
        "modules_in_circles": count_modules_in_circles(
            grimp.build_graph("megadapo", cache_dir=None)
        ),
    }
    assert counts.keys() == limits.keys()
    for name, count in counts.items():
        print(f"{name}: {count} of at most {limits[name]}")
    larger = [name for name, count in counts.items() if count > limits[name]]
    if larger:
        print(f"{', '.join(larger)}: remove what the change makes idle, see CONTRIBUTING.md")
    return 1 if larger else 0


def count_product() -> dict[str, int]:
    """Count lines of product and tests, classes, and class names that are used again."""
    product = [*ROOT.glob("megadapo/**/*.py"), *ROOT.glob("kernels/**/*.py")]
    sources = [path.read_text(encoding="utf-8") for path in product]
    classes = Counter(
        node.name.lstrip("_")
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    )
    tests = [path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/*.py")]
    return {
        "product_lines": sum(source.count("\n") for source in sources),
        "test_lines": sum(source.count("\n") for source in tests),
        "classes": classes.total(),
        "repeated_class_names": sum(number > 1 for number in classes.values()),
    }


def count_keys(schema: dict[str, Any], node: dict[str, Any] | None = None) -> int:
    """Count the keys of a configuration, without those of the tables in lists."""
    node = schema if node is None else node
    total = 0
    for value in node.get("properties", {}).values():
        inner = value["allOf"][0] if "allOf" in value else value
        if "$ref" in inner:
            inner = schema["$defs"][inner["$ref"].rpartition("/")[2]]
        total += count_keys(schema, inner) if inner.get("properties") else 1
    return total


def count_modules_in_circles(graph: grimp.ImportGraph) -> int:
    """Count the modules that import themselves through others, also for type checking only."""
    imported = {module: graph.find_upstream_modules(module) for module in graph.modules}
    return sum(
        any(module in imported[other] for other in others) for module, others in imported.items()
    )


if __name__ == "__main__":
    sys.exit(main())
