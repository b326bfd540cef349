"""The report: runs with facts, curves, oracles and configuration as one HTML file.

Model output is hostile input: data is JSON in which nothing can end its script element, the page
inserts it as text only, and the content security policy lets no script run but the page's own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from typing import Literal, TypeAlias

from megadapo import __version__
from megadapo.observe.files import replace_text
from megadapo.observe.metrics.names import METRICS
from megadapo.observe.metrics.records import EvaluationRecord, MetricRecord
from megadapo.observe.oracles import BOUNDED, MAX_SKIPPED_STEPS, is_within
from megadapo.observe.panels import HELD_OUT, NOT_CURVES, PHASES, sections_with_values
from megadapo.observe.report.responses import MAX_BYTES, SavedResponses, SavedRun, read_responses
from megadapo.observe.run_records import RunRecords, leaves
from megadapo.observe.summary import before_after, costs
from megadapo.observe.tables import TextTable, formatted, stretches

Flat: TypeAlias = dict[str, str | int | float | bool | None]


@dataclass(frozen=True, kw_only=True)
class RunView:
    """One run on the page, without its responses."""

    name: str
    folder: str
    title: str
    """Progress and dates in one line."""
    warnings: list[str]
    first_step: int
    last_step: int
    rows: list[tuple[str, str, str]]
    """Before and after, as text."""
    costs: list[tuple[str, str]]
    series: dict[str, Series]
    evaluations: list[EvaluationRecord]
    verdicts: list[Verdict]
    config: Flat
    """The resolved configuration by dotted key; a list is text."""


def read_runs(folders: Sequence[Path]) -> list[RunView]:
    """Read run folders; each gets the shortest name that tells it from the others.

    Raises DataError for a folder without recorded steps, or with a damaged file.
    """
    return [read_run(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def read_run(folder: Path, name: str, *, state: str = "") -> RunView:
    """Read a run folder; with the `state` of a run that works it may have no steps."""
    run = RunRecords(folder)
    records, evaluations = run.steps if state else run.need_steps(), run.evaluations
    config: Flat = {
        key: value if value is None or isinstance(value, str | int | float) else json.dumps(value)
        for key, value in leaves(run.config)
    }
    steps, wanted = [int(one["step"] or 0) for one in records] or [0], config.get("run.num_steps")
    of_all = "" if wanted is None else f" of {wanted}"
    return RunView(
        name=name,
        folder=str(folder),
        title=" \u00b7 ".join([f"{steps[-1]}{of_all} steps", *[state] * bool(state), *_dates(run)]),
        warnings=run.warnings,
        first_step=steps[0],
        last_step=steps[-1],
        rows=before_after(records, evaluations) if records else [],
        costs=costs(records) if records else [],
        series=read_series(records),
        # curves of accuracy; the score of others is a metric
        evaluations=[one for one in evaluations if one.accuracy is not None],
        verdicts=judge(records, run.config.get("oracles", {})),
        config=config,
    )


def _names(folders: Sequence[Path]) -> list[str]:
    paths = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(len(parts) for parts in paths)):
        names = ["/".join(parts[-depth:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{folder} ({number})" for number, folder in enumerate(folders, start=1)]


def _dates(run: RunRecords) -> list[str]:
    """Return when the log begins and ends; [] without a log."""
    stamps = []
    for line in run.log_lines:
        with suppress(ValueError):
            stamps.append(datetime.fromisoformat(line.partition(" ")[0]))
    if not stamps:
        return []
    first, last = stamps[0], stamps[-1]
    same_day = first.date() == last.date()
    return [f"{first:%Y-%m-%d %H:%M} to {last:{'%H:%M' if same_day else '%Y-%m-%d %H:%M'}}"]


Status = Literal["held", "broken", "no bound", "not measured"]

MAX_CELLS = 120
"""Cells of the strip that shows an oracle over the steps."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One oracle over a whole run."""

    key: str
    """Key of `[oracles]`; "skipped updates" has none."""
    metric: str
    bound: float | None
    worst: str
    """The worst value as text, as it may be nan."""
    worst_step: int | None
    status: Status
    cells: list[int]
    """Stretches of steps, oldest first: 1 held, 0 broken, -1 not measured or not bounded."""
    meaning: str


def judge(records: Sequence[MetricRecord], bounds: Mapping[str, float | None]) -> list[Verdict]:
    """Compare the steps of a run with the `oracles` of its configuration."""
    verdicts = [
        _judge_metric(records, bounds.get(key), key, metric, meaning)
        for key, metric, meaning in BOUNDED
    ]
    return [*verdicts, _judge_skipped(records)]


def _judge_metric(
    records: Sequence[MetricRecord], bound: float | None, key: str, metric: str, meaning: str
) -> Verdict:
    measured = [r for r in records if r.get(metric) is not None]
    # a value that is not a number is worse than any
    worst = max(measured, key=lambda r: (math.isnan(r[metric] or 0.0), r[metric]), default=None)
    # a metric that other steps have and that ended the run by missing has broken its bound; one
    # that no step has is not checked
    states = [
        -1
        if bound is None or not measured or (r.get(metric) is None and is_within(r, metric, bound))
        else int(is_within(r, metric, bound))
        for r in records
    ]
    return Verdict(
        key=key,
        metric=metric,
        bound=bound,
        worst=formatted(None if worst is None else worst[metric], ".3g").replace("e-0", "e-"),
        worst_step=int(worst["step"] or 0) if worst is not None and worst[metric] else None,
        status=_status(bound, states),
        cells=_cells(states),
        meaning=meaning,
    )


def _judge_skipped(records: Sequence[MetricRecord]) -> Verdict:
    streak, longest, worst_step = 0, 0, None
    states = []
    for record in records:
        skipped = record.get("policy/skipped_updates")
        streak = streak + 1 if skipped else 0
        if streak > longest:
            longest, worst_step = streak, int(record["step"] or 0)
        states.append(-1 if skipped is None else int(streak < MAX_SKIPPED_STEPS))
    measured = any(r.get("policy/skipped_updates") is not None for r in records)
    return Verdict(
        key="skipped updates",
        metric="policy/skipped_updates",
        bound=MAX_SKIPPED_STEPS,
        worst=f"{longest} in a row" if measured else "-",
        worst_step=worst_step,
        status=_status(MAX_SKIPPED_STEPS, states),
        cells=_cells(states),
        meaning="updates were skipped because the loss or its gradient was not finite",
    )


def _status(bound: float | None, states: Sequence[int]) -> Status:
    if bound is None:
        return "no bound"
    if 0 in states:
        return "broken"
    return "held" if 1 in states else "not measured"


def _cells(states: list[int]) -> list[int]:
    """Return stretches of steps; one broken step breaks its stretch."""
    return [0 if 0 in stretch else max(stretch) for stretch in stretches(states, MAX_CELLS)]


MAX_POINTS = 2000
"""Points of one curve: more than a chart has pixels across."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One metric over the steps at which it was measured."""

    steps: list[int]
    values: list[float | None]
    """Values; None if not finite."""
    num_measured: int
    """Steps before thinning."""
    num_not_finite: int


def read_series(records: Sequence[MetricRecord]) -> dict[str, Series]:
    """Return every metric that was measured at least once, by name in the order of the records."""
    names = dict.fromkeys(name for record in records for name in record)
    # drawn on top of each other: each curve needs a value at every step of the others
    stacked = {"time/step_s", *(name for part in PHASES.values() for name in part)}
    common = _steps_of_all(records, stacked)
    curves = {}
    for name in names:
        points = [
            (int(record["step"] or 0), float(value))
            for record in records
            if isinstance(value := record.get(name), int | float)
        ]
        if points and name not in NOT_CURVES:
            at_common = [point for point in points if point[0] in common]
            kept = at_common if name in stacked else _thin(points)
            curves[name] = Series(
                steps=[step for step, _ in kept],
                values=[value if math.isfinite(value) else None for _, value in kept],
                num_measured=len(points),
                num_not_finite=sum(not math.isfinite(value) for _, value in points),
            )
    return curves


def _steps_of_all(records: Sequence[MetricRecord], names: set[str]) -> set[int]:
    """Return the steps that the sum of some metrics keeps, so the same ones for all of them."""
    sums = []
    for record in records:
        found = [value for name in names if (value := record.get(name)) is not None]
        sums.append((int(record["step"] or 0), sum(filter(math.isfinite, found))))
    return {step for step, _ in _thin(sums)}


def _thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Keep the lowest and the highest point of equal stretches, so that no spike is lost."""
    if len(points) <= MAX_POINTS:
        return points
    width = math.ceil(2 * len(points) / MAX_POINTS)
    kept = []
    for start in range(0, len(points), width):
        stretch = points[start : start + width]
        finite = [point for point in stretch if math.isfinite(point[1])]
        if not finite:
            kept.append(stretch[0])
            continue
        ends = {min(finite, key=itemgetter(1)), max(finite, key=itemgetter(1))}
        kept.extend(sorted(ends))
    return kept


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
    replace_text(output, render(folders, tables=tables, max_bytes=max_bytes), with_folder=True)
    return output


def render(
    folders: Sequence[Path], *, tables: Sequence[TextTable] = (), max_bytes: int = MAX_BYTES
) -> str:
    """Return the report of run folders as HTML; the arguments are those of `write_report`."""
    runs, saved = read_runs(folders), read_responses(folders, max_bytes=max_bytes)
    return as_html(contents(runs, saved, tables=tables))


def contents(
    runs: Sequence[RunView], saved: SavedResponses, tables: Sequence[TextTable] = (), live: str = ""
) -> dict[str, object]:
    """Return what the page's scripts read; `live` is the version of a live page's contents."""
    entries, chunks = saved.contents()
    names = dict.fromkeys(name for run in runs for name in run.series)
    if any(run.evaluations for run in runs):
        names[HELD_OUT] = None
    sections = sections_with_values(names)
    data = {
        "live": live,
        "version": __version__,
        "written": f"{datetime.now():%Y-%m-%d %H:%M}",
        "tables": [asdict(table) for table in tables],
        "runs": [asdict(run) for run in runs],
        "sections": [(head, [asdict(panel) for panel in panels]) for head, panels in sections],
        "meanings": {name: METRICS[name] for name in names if name in METRICS},
        "phases": PHASES,
        "saved": [_saved_run(run) for run in saved.runs],
        "groups": [asdict(entry) for entry in entries],
    }
    return {"data": data, "chunks": chunks}


def as_html(contents: Mapping[str, object], *, live: bool = False) -> str:
    """Return the page with its contents; a live one may fetch newer contents from its server."""
    library = _asset(_LIBRARY_SCRIPT)
    script = "\n".join(_asset(name) for name in _SCRIPTS)
    style = "\n".join(_asset(name) for name in _STYLES)
    slots = {
        "policy": _policy(library, script, style, live=live),
        "style": style,
        "data": script_json(contents["data"]),
        "chunks": script_json(contents["chunks"]),
        "library": library,
        "script": script,
    }
    return _SLOT.sub(lambda match: slots[match[1]], _asset("page.html"))


def _saved_run(run: SavedRun) -> dict[str, object]:
    length, accuracy = run.length(), run.accuracy()
    return {
        "num_groups": run.num_groups,
        "num_responses": run.num_responses,
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


def _policy(*texts: str, live: bool) -> str:
    """Return a content security policy: inline scripts, a style last, the server of a live page."""
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    *scripts, style = (f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    connect = "connect-src 'self'; " * live
    return (
        f"default-src 'none'; script-src {' '.join(scripts)}; style-src {style}; "
        f"{connect}base-uri 'none'; form-action 'none'"
    )
