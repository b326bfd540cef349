"""The files of an ablation: JSON, a picture, Markdown, and one HTML page with every run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megadapo.errors import DataError
from megadapo.lab.ablation.curves import draw_rows
from megadapo.lab.ablation.result import AblationResult, to_json
from megadapo.lab.ablation.tables import markdown
from megadapo.observe.report import REPORT_FILE, TextTable, write_report

JSON_FILE = "ablation.json"
MARKDOWN_FILE = "ablation.md"
PICTURE_FILE = "ablation.png"

MAX_BYTES = 8 * 2**20
"""Compressed responses on the page, of all runs together."""


def write_reports(result: AblationResult, tables: Sequence[TextTable]) -> list[Path]:
    """Write all files into the ablation's folder and return their paths.

    Without a finished run there is nothing to draw: JSON and Markdown alone.

    Raises:
        DataError: a run's folder holds a damaged file, or one cannot be written.
    """
    folder, title = result.plan.folder, _title(result)
    paths = [folder / JSON_FILE, folder / MARKDOWN_FILE]
    drawn = bool(result.folders)
    picture = f"\n![Mean curves in bands of their standard errors]({PICTURE_FILE})\n" * drawn
    _write(paths[0], json.dumps(to_json(result), indent=1) + "\n")
    _write(paths[1], markdown(title, tables) + picture)
    if drawn:
        paths.append(folder / PICTURE_FILE)
        draw_rows([(row.row.name, row.folders) for row in result.rows], title, paths[-1])
        page = folder / REPORT_FILE
        paths.append(write_report(result.folders, page, tables=tables, max_bytes=MAX_BYTES))
    return paths


def _title(result: AblationResult) -> str:
    plan, num_seeds = result.plan, len(result.plan.seeds)
    seeds = f"{num_seeds} seed" + "s" * (num_seeds != 1)
    return f"Ablation {plan.rows_file.stem}: {len(plan.rows.row)} rows, {seeds}"


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from error
