"""Results of an ablation over its seeds, and their report: tables, curves and files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megadapo.lab.ablation.measures import (
    END_STEPS,
    MEASURES,
    Measure,
    Measured,
    Noise,
    Spread,
    difference,
    measure,
    not_mixed_share,
    trained_not_mixed_share,
)
from megadapo.lab.ablation.rows import Ablation, AblationRow, Expectation
from megadapo.lab.ablation.runner import RunFailure
from megadapo.lab.record import write_record, write_text
from megadapo.observe.metrics.records import MetricRecord
from megadapo.observe.plot import COLOURS, STYLE, finish, save
from megadapo.observe.report import REPORT_FILE, write_report
from megadapo.observe.run_records import RunRecords, leaves
from megadapo.observe.tables import TextTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True)
class RowResult:
    """One row over its seeds."""

    row: AblationRow
    runs: dict[int, Measured]
    """Measures of each finished run, by seed."""
    folders: tuple[Path, ...]
    """Folders of the finished runs."""

    def spread(self, name: str) -> Spread | None:
        return Spread.of([run[name] for run in self.runs.values()])


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One expectation of a row, and the measured difference."""

    row: str
    other: str
    expectation: Expectation
    difference: Spread | None
    noise: Noise | None
    """Noise of this measure's differences."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the difference; None if it cannot be computed."""
        if self.difference is None or self.noise is None or self.difference.is_zero:
            return None
        return self.noise.interval(self.difference)

    @property
    def verdict(self) -> str:
        """The conclusion that the numbers support, in words."""
        found, interval, wanted = self.difference, self.interval, self.expectation.change
        if found is None:
            return "not measured"
        if found.is_zero:
            return "not shown: no difference in any seed"
        if interval is None:
            return "not shown: one seed has no standard error"
        if interval[0] <= 0.0 <= interval[1]:
            return "not shown: the 95 % interval includes 0"
        direction = "higher" if found.mean > 0 else "lower"
        return f"{direction}, as expected" if direction == wanted else f"{direction}, the opposite"


@dataclass(frozen=True, kw_only=True)
class AblationResult:
    """The rows in the order of their file, and the failed runs."""

    ablation: Ablation
    rows: tuple[RowResult, ...]
    failures: tuple[RunFailure, ...]

    @property
    def folders(self) -> list[Path]:
        return [folder for row in self.rows for folder in row.folders]

    def difference(self, row: str, other: str, one: Measure) -> Spread | None:
        """Return a measure of one row minus another's, over their common seeds."""
        runs = {result.row.name: result.runs for result in self.rows}
        return difference(runs[row], runs[other], one.name)

    @property
    def unchanged(self) -> list[str]:
        """Rows with the same results as the row they are compared with, except for the seconds."""
        runs = {result.row.name: result.runs for result in self.rows}
        return [
            row
            for row, other in self.ablation.rows.comparisons
            if any(seed in runs[other] for seed in runs[row])
            and all(
                _without_seconds(runs[row][seed]) == _without_seconds(runs[other][seed])
                for seed in runs[row]
                if seed in runs[other]
            )
        ]

    @property
    def effects(self) -> list[Effect]:
        """The expectations of all rows with the measured differences."""
        comparisons = self.ablation.rows.comparisons
        differences = {
            measure.name: {pair: self.difference(*pair, measure) for pair in comparisons}
            for measure in MEASURES
        }
        expected = {result.row.name: result.row.expects for result in self.rows}
        return [
            Effect(
                row=row,
                other=other,
                expectation=expectation,
                difference=differences[expectation.measure][row, other],
                noise=Noise.of(list(differences[expectation.measure].values())),
            )
            for row, other in comparisons
            for expectation in expected[row]
        ]


def _without_seconds(measured: Measured) -> dict[str, float | None]:
    return {name: value for name, value in measured.items() if not name.startswith("seconds")}


def collect(ablation: Ablation, failures: Sequence[RunFailure] = ()) -> AblationResult:
    """Read the results of the finished runs."""
    rows = []
    for row in ablation.rows.row:
        finished = [run for run in ablation.runs if run.row == row and run.state() == "finished"]
        rows.append(
            RowResult(
                row=row,
                runs={run.seed: measure(run.folder, ablation.rows.accuracy) for run in finished},
                folders=tuple(run.folder for run in finished),
            )
        )
    return AblationResult(ablation=ablation, rows=tuple(rows), failures=tuple(failures))


def to_json(result: AblationResult) -> dict[str, Any]:
    """Return the result as JSON values."""
    ablation = result.ablation
    return {
        "config": ablation.config,
        "rows_file": str(ablation.rows_file),
        "cumulative": ablation.rows.cumulative,
        "accuracy": ablation.rows.accuracy,
        "num_steps": ablation.runs[0].config.run.num_steps,
        "seeds": list(ablation.seeds),
        "rows": [_row_json(result, index) for index in range(len(result.rows))],
        "differences": [
            {
                "row": row,
                "from": other,
                "measures": {
                    measure.name: _spread_json(result.difference(row, other, measure))
                    for measure in MEASURES
                },
            }
            for row, other in ablation.rows.comparisons
        ],
        "unchanged": result.unchanged,
        "effects": [
            {
                "row": effect.row,
                "from": effect.other,
                "expected": effect.expectation.model_dump(),
                "difference": _spread_json(effect.difference),
                "interval": effect.interval,
                "verdict": effect.verdict,
            }
            for effect in result.effects
        ],
        "failures": [
            {"row": failure.run.row.name, "seed": failure.run.seed}
            | {"exit_code": failure.exit_code, "message": failure.message}
            for failure in result.failures
        ],
    }


def _row_json(result: AblationResult, index: int) -> dict[str, Any]:
    row = result.rows[index]
    return {
        "name": row.row.name,
        "source": row.row.source,
        "config": row.row.config,
        "overrides": dict(leaves(result.ablation.rows.overrides_of(index))),
        "runs": {str(seed): dict(measured) for seed, measured in row.runs.items()},
        "measures": {measure.name: _spread_json(row.spread(measure.name)) for measure in MEASURES},
    }


def _spread_json(spread: Spread | None) -> dict[str, Any] | None:
    return None if spread is None else asdict(spread)


JSON_FILE = "ablation.json"
MARKDOWN_FILE = "ablation.md"
PICTURE_FILE = "ablation.png"
MAX_BYTES = 8 * 2**20
"""Limit of compressed responses on the page, over all runs."""
PLUS_MINUS = "\u00b1"

Dash = Literal["-", "--", ":", "-."]
_DASHES: tuple[Dash, ...] = ("-", "--", ":", "-.")

Points = Iterator[tuple[int, float | None]]
"""Steps and values of a run."""


def write_reports(result: AblationResult, tables: Sequence[TextTable]) -> list[Path]:
    """Write all files into the ablation's folder and return their paths.

    Without a finished run these are only JSON and Markdown.
    """
    ablation, num_seeds = result.ablation, len(result.ablation.seeds)
    seeds = f"{num_seeds} seed" + "s" * (num_seeds != 1)
    title = f"Ablation {ablation.rows_file.stem}: {len(ablation.rows.row)} rows, {seeds}"
    paths = [ablation.folder / JSON_FILE, ablation.folder / MARKDOWN_FILE]
    is_drawn = bool(result.folders)
    picture = f"\n![Mean curves in bands of their standard errors]({PICTURE_FILE})\n" * is_drawn
    write_record(paths[0], to_json(result))
    write_text(paths[1], markdown(title, tables) + picture)
    if is_drawn:
        paths.append(ablation.folder / PICTURE_FILE)
        draw_rows([(row.row.name, row.folders) for row in result.rows], title, paths[-1])
        page = ablation.folder / REPORT_FILE
        paths.append(write_report(result.folders, page, tables=tables, max_bytes=MAX_BYTES))
    return paths


def ablation_tables(result: AblationResult) -> list[TextTable]:
    """Return tables of measures, differences between rows, expected effects and failures."""
    tables = [_measures(result), _differences(result)]
    if result.effects:
        tables.append(_effects(result))
    if result.failures:
        rows = [
            [failure.run.name, str(failure.exit_code), failure.message, str(failure.run.log)]
            for failure in result.failures
        ]
        note = "The other tables leave these runs out."
        head = ["run", "exit code", "message", "log"]
        tables.append(TextTable(title="Failed runs", note=note, head=head, rows=rows))
    return tables


def _measures(result: AblationResult) -> TextTable:
    ablation, num = result.ablation, len(result.ablation.seeds)
    has_source = any(row.row.source for row in result.rows)
    note = (
        f"Mean {PLUS_MINUS} standard error over {num} seed{'s' if num != 1 else ''} "
        f"({', '.join(map(str, ablation.seeds))}), {ablation.runs[0].config.run.num_steps} steps "
        f"each, on {ablation.config}. Entropy (nats) and length (tokens) are means of the last "
        f"{END_STEPS} steps, shares and bounds of all steps, seconds without start and evaluation. "
        f"Steps, tokens and seconds to accuracy: to {ablation.rows.accuracy:g} held-out, as "
        "evaluations see it; (k/n): k of n runs reached it. Tokens include those of stopped "
        "groups. No signal: groups all correct or all incorrect, of those sampled and of those "
        "trained on."
    )
    short = [f"{row.row.name}: {len(row.runs)}" for row in result.rows if len(row.runs) < num]
    if short:
        note += f" Finished seeds of incomplete rows: {'; '.join(short)}."
    measures = _measured(result)
    rows = [
        [
            row.row.name,
            *(cell(row.spread(measure.name), measure.form, len(row.runs)) for measure in measures),
        ]
        + [row.row.source] * has_source
        for row in result.rows
    ]
    head = ["row", *(measure.label for measure in measures), *["source"] * has_source]
    return TextTable(title="Rows", note=note, head=head, rows=rows)


def _differences(result: AblationResult) -> TextTable:
    other = "the previous row" if result.ablation.rows.cumulative else "the first row"
    note = (
        f"Each row minus {other}, paired by seed: mean {PLUS_MINUS} standard error, shares in "
        "points; no value if a seed lacks the measure, such as steps to an accuracy never reached. "
        "With this many differences a few exclude 0 by chance."
    )
    if result.unchanged:
        note += (
            f" Rows with results identical to {other}, except for the seconds: "
            f"{'; '.join(result.unchanged)}. Their change had no effect in these runs."
        )
    measures = _measured(result)
    rows = [
        [
            row,
            *(
                cell(result.difference(row, other, measure), measure.form, sign=True)
                for measure in measures
            ),
        ]
        for row, other in result.ablation.rows.comparisons
    ]
    return TextTable(
        title="Differences",
        note=note,
        head=["row", *(measure.label for measure in measures)],
        rows=rows,
    )


def _measured(result: AblationResult) -> list[Measure]:
    """Return the measures that some row has, such as BAPO's bounds."""
    return [measure for measure in MEASURES if any(row.spread(measure.name) for row in result.rows)]


def _effects(result: AblationResult) -> TextTable:
    note = (
        "Expected changes of a row, and the measured ones. A difference counts as shown if its "
        "95 % interval excludes 0 (Student's t; the wider of two: with the standard deviation "
        "pooled over all rows' differences, and with the row's own)."
    )
    measures = {measure.name: measure for measure in MEASURES}
    rows = []
    for effect in result.effects:
        one = measures[effect.expectation.measure]
        interval = "-"
        if effect.interval is not None:
            form = one.form.replace("{:", "{:+")
            interval = " to ".join(form.format(bound) for bound in effect.interval)
        rows.append(
            [
                effect.row,
                f"{one.label} {effect.expectation.change}",
                cell(effect.difference, one.form, sign=True),
                interval,
                effect.verdict,
                effect.expectation.source,
            ]
        )
    head = ["row", "expected", "difference", "95 % interval", "verdict", "source"]
    return TextTable(title="Effects", note=note, head=head, rows=rows)


def cell(
    spread: Spread | None, form: str, num_runs: int | None = None, *, sign: bool = False
) -> str:
    """Return a mean with its standard error, and the number of runs if some have no value.

    Args:
        form: format string of a value.
        num_runs: number of runs; None: not compared with the number of values.
        sign: show a plus sign.
    """
    if spread is None:
        return "-"
    parts = [(form.replace("{:", "{:+") if sign else form).format(spread.mean)]
    if spread.standard_error is not None:
        parts += [PLUS_MINUS, form.format(spread.standard_error)]
    if num_runs is not None and spread.num < num_runs:
        parts.append(f"({spread.num}/{num_runs})")
    return " ".join(parts)


def markdown(title: str, tables: Sequence[TextTable]) -> str:
    """Return the tables as a Markdown page."""
    return "\n".join([f"# {title}", *(table.markdown() for table in tables)]) + "\n"


def _of(value: Callable[[MetricRecord], float | None]) -> Callable[[RunRecords], Points]:
    return lambda run: ((int(record["step"] or 0), value(record)) for record in run.steps)


def _metric(name: str) -> Callable[[RunRecords], Points]:
    return _of(lambda record: record.get(name))


PANELS: tuple[tuple[str, Callable[[RunRecords], Points]], ...] = (
    (
        "Held-out accuracy",
        lambda run: ((evaluation.step, evaluation.accuracy) for evaluation in run.evaluations),
    ),
    ("Training accuracy", _metric("accuracy/mean")),
    ("Entropy (nats per token)", _metric("policy/entropy")),
    ("Response length (tokens)", _metric("response_length/mean")),
    ("Sampled groups without signal (share)", _of(not_mixed_share)),
    ("Trained groups without signal (share)", _of(trained_not_mixed_share)),
    ("Clipped above (fraction of tokens)", _metric("policy/clip_high_fraction")),
    ("Token probability", _metric("policy/token_probability_mean")),
)


def draw_rows(rows: Sequence[tuple[str, Sequence[Path]]], title: str, output: Path) -> None:
    """Draw each row's mean over its seeds, in a band of its standard error, into a PNG.

    Args:
        rows: names, and folders of the runs; a row without runs is left out.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    read = [(name, [RunRecords(folder) for folder in runs]) for name, runs in rows if runs]
    styled = [
        # rows that share a colour differ in their dashes
        (name, runs, COLOURS[place % len(COLOURS)], _DASHES[place // len(COLOURS) % len(_DASHES)])
        for place, (name, runs) in enumerate(read)
    ]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(17.5, 7.5), layout="constrained")
        for axes, (panel, points) in zip(figure.subplots(2, 4).flat, PANELS, strict=True):
            axes.set_title(panel)
            for _, runs, colour, dash in styled:
                _band(axes, [points(run) for run in runs], colour, dash)
            finish(axes)
        figure.suptitle(title, fontsize=13)
        handles = [
            Line2D([], [], color=colour, linestyle=dash, label=name)
            for name, _, colour, dash in styled
        ]
        if handles:
            figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6))
        save(figure, output)


def _band(axes: Axes, runs: Sequence[Points], colour: str, dash: Dash) -> None:
    by_step: dict[int, list[float | None]] = {}
    for step, value in itertools.chain.from_iterable(runs):
        is_known = value is not None and math.isfinite(value)
        by_step.setdefault(step, []).append(value if is_known else None)
    spreads = [(step, spread) for step in sorted(by_step) if (spread := Spread.of(by_step[step]))]
    if not spreads:
        return
    steps = [step for step, _ in spreads]
    means = [spread.mean for _, spread in spreads]
    errors = [spread.standard_error or 0.0 for _, spread in spreads]
    low = [mean - error for mean, error in zip(means, errors, strict=True)]
    high = [mean + error for mean, error in zip(means, errors, strict=True)]
    marker = "o" if len(steps) < 3 else None
    axes.plot(steps, means, color=colour, linestyle=dash, marker=marker, label="mean")
    axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
