"""Columns of a user's rows by likely names, and rows held out of training."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megadapo.data.config import DataColumns
from megadapo.data.rows import GOLDS, PROMPTS, Row
from megadapo.errors import ConfigError, DataError

NUM_HELD_OUT = 64
"""Most prompts that are held out."""
LIKELY = {
    "prompt": (PROMPTS, {"prompt", "question", "problem", "instruction", "input", "query", "task"}),
    "ground_truth": (GOLDS, {"truth", "answer", "solution", "gold", "target", "label", "output"}),
}
"""Usual columns by key, and words in the names of others."""


def likely_columns(rows: Iterator[Row], columns: DataColumns) -> dict[str, str]:
    """Return the columns that `[data.columns]` must name, as the first row has no usual name.

    Raises:
        ConfigError: no column is likely, or several are.
    """
    found: dict[str, str] = {}
    for row in rows:
        for key, (usual, words) in LIKELY.items():
            if getattr(columns, key) is not None or any(row.has(name) for name in usual):
                continue
            likely = [name for name in row.columns if words & {*re.split("[^a-z]+", name.lower())}]
            if len(likely) != 1 or likely[0] in found.values():
                raise ConfigError(
                    f"{row.place}: the columns are {', '.join(row.columns)}, and "
                    f"{' or '.join(likely) or 'none of them'} may be the {key}: name it with "
                    f"--data.columns.{key}=COLUMN"
                )
            found[key] = likely[0]
        break
    return found


def hold_out(rows: Sequence[Row], stem: Path) -> list[tuple[str, list[Row]]]:
    """Write the rows to STEM-train.jsonl and STEM-held-out.jsonl; return the rows of both files.

    A tenth of the prompts are held out, at most NUM_HELD_OUT, with all rows of each.
    """
    prompts = list(dict.fromkeys(row.messages for row in rows))
    number = min(NUM_HELD_OUT, max(len(prompts) // 10, min(16, len(prompts) // 4)))
    if number == 0:
        raise DataError(f"{len(prompts)} prompts are too few to hold some out: take 4 or more")
    chosen = set(random.Random(0).sample(prompts, number))
    parts = [
        (f"{stem}-train.jsonl", [row for row in rows if row.messages not in chosen]),
        (f"{stem}-held-out.jsonl", [row for row in rows if row.messages in chosen]),
    ]
    for name, kept in parts:
        columns = (dict(row.columns) for row in kept)
        lines = [json.dumps(one, default=str) + "\n" for one in columns]
        path, text = Path(name), "".join(lines)
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise ConfigError(f"{name} exists and has other rows: change --output")
        path.write_text(text, encoding="utf-8")
    return parts
