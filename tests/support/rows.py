"""Files of rows for tests of data."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megadapo.data.arithmetic import Problem


def write_parquet(path: Path, problems: list[Problem]) -> None:
    """Write problems in the schema of DAPO-Math-17k."""
    pq.write_table(pa.Table.from_pylist([problem.row() for problem in problems]), path)


def write_jsonl(path: Path, *rows: object) -> str:
    """Write rows as lines of JSON; return the path as a text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
