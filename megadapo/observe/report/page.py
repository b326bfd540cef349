"""Puts data and assets together into one HTML file.

Model output is hostile input: data is JSON in which nothing can end its script element, the page
inserts it as text only, and the content security policy lets no script run but the page's own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from importlib.resources import files
from pathlib import Path

from megadapo import __version__
from megadapo.observe.files import replace_text
from megadapo.observe.metrics.names import METRICS
from megadapo.observe.panels import HELD_OUT, PHASES, sections_with_values
from megadapo.observe.report.responses import MAX_BYTES, GroupEntry, SavedRun, read_responses
from megadapo.observe.report.runs import read_runs
from megadapo.observe.tables import TextTable

REPORT_FILE = "report.html"

_LIBRARY_SCRIPT = "uplot/uPlot.iife.min.js"
# The order matters: a script uses names that earlier ones declare.
_SCRIPTS = (
    "core.js",
    "tables.js",
    "overview.js",
    "plot.js",
    "curves.js",
    "against.js",
    "time.js",
    "distributions.js",
    "conversation.js",
    "tokens.js",
    "filters.js",
    "group.js",
    "responses.js",
    "page.js",
)
_STYLES = ("uplot/uPlot.min.css", "report.css")
_SLOT = re.compile(r"\{\{(\w+)\}\}")
# What HTML or a script could read as more than text; all of it is inside JSON strings.
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def write_report(
    folders: Sequence[Path],
    output: Path,
    *,
    tables: Sequence[TextTable] = (),
    max_bytes: int = MAX_BYTES,
) -> Path:
    """Write the report of run folders into one HTML file and return its path.

    Args:
        tables: shown before the runs.
        max_bytes: of compressed responses on the page.

    Raises:
        DataError: a folder has no recorded steps, or a file is damaged.
        InfraError: the page cannot be written; an earlier one is unchanged.
    """
    page = render(folders, tables=tables, max_bytes=max_bytes)
    replace_text(output, page, with_folder=True)
    return output


def render(
    folders: Sequence[Path], *, tables: Sequence[TextTable] = (), max_bytes: int = MAX_BYTES
) -> str:
    """Return the report of run folders as HTML; the arguments are those of `write_report`."""
    runs = read_runs(folders)
    saved = read_responses(folders, max_bytes=max_bytes)
    entries, chunks = saved.contents()
    names = dict.fromkeys(name for run in runs for name in run.series)
    if any(run.evaluations for run in runs):
        names[HELD_OUT] = None
    sections = sections_with_values(names)
    data = {
        "version": __version__,
        "written": f"{datetime.now():%Y-%m-%d %H:%M}",
        "tables": [asdict(table) for table in tables],
        "runs": [asdict(run) for run in runs],
        "sections": [(head, [asdict(panel) for panel in panels]) for head, panels in sections],
        "meanings": {name: METRICS[name] for name in names if name in METRICS},
        "phases": PHASES,
        "saved": [_saved_run(number, run, entries) for number, run in enumerate(saved.runs)],
        "groups": [asdict(entry) for entry in entries],
    }
    library = _asset(_LIBRARY_SCRIPT)
    script = "\n".join(_asset(name) for name in _SCRIPTS)
    style = "\n".join(_asset(name) for name in _STYLES)
    slots = {
        "policy": _policy([library, script], style),
        "style": style,
        "data": script_json(data),
        "chunks": script_json(chunks),
        "library": library,
        "script": script,
    }
    return _SLOT.sub(lambda match: slots[match[1]], _asset("page.html"))


def _saved_run(number: int, run: SavedRun, entries: Sequence[GroupEntry]) -> dict[str, object]:
    length, accuracy = run.length(), run.accuracy()
    return {
        "num_groups": run.num_groups,
        "num_responses": run.num_responses,
        "num_shown": sum(entry.run == number for entry in entries),
        "length": length and asdict(length),
        "accuracy": accuracy and asdict(accuracy),
    }


def script_json(value: object) -> str:
    """Return JSON that is safe inside a script element: ASCII without <, > and &.

    A number that is not finite becomes null.
    """
    plain = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    return plain.translate(_ESCAPES)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _policy(scripts: Sequence[str], style: str) -> str:
    """Return a content security policy for these inline texts and nothing else."""
    allowed = " ".join(_source(script) for script in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_source(style)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _source(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
