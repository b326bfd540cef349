"""Parquet files of arithmetic problems."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megadapo.data.arithmetic import Problem


def write_parquet(path: Path, problems: list[Problem]) -> None:
    """Write problems in the schema of DAPO-Math-17k."""
    pq.write_table(pa.Table.from_pylist([problem.row() for problem in problems]), path)
