"""Results of an ablation over its seeds, and their report: tables, curves and files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from megadapo.lab.ablation.rows import Ablation, Expectation
from megadapo.lab.ablation.runner import RunFailure
from megadapo.lab.record import write_record
from megadapo.observe.files import replace_text
from megadapo.observe.metrics.records import MetricRecord
from megadapo.observe.plot import COLOURS, DASHES, STYLE, finish, save
from megadapo.observe.report.page import REPORT_FILE, write_report
from megadapo.observe.run_records import RunRecords, leaves
from megadapo.observe.tables import TextTable, count

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    """The finished runs of an ablation, by the row's name and the seed, and the failed runs."""

    ablation: Ablation
    runs: dict[str, dict[int, RunRecords]]
    """Records of the finished runs."""
    measured: dict[str, dict[int, Measured]]
    """Measures of the finished runs."""
    failures: Sequence[RunFailure]

    @property
    def folders(self) -> list[Path]:
        return [run.folder for runs in self.runs.values() for run in runs.values()]

    def spread(self, row: str, name: str) -> Spread | None:
        """Return a measure of a row over its seeds."""
        return Spread.of([measured[name] for measured in self.measured[row].values()])

    def difference(self, row: str, other: str, name: str) -> Spread | None:
        """Return a measure of one row minus another's, over their common seeds."""
        return difference(self.measured[row], self.measured[other], name)

    @property
    def unchanged(self) -> list[str]:
        """Rows with the same results as the row they are compared with, except for the seconds."""
        found = []
        for row, other in self.ablation.rows.comparisons:
            one, two = self.measured[row], self.measured[other]
            common = one.keys() & two.keys()
            if common and all(
                one[seed][name] == two[seed][name]
                for seed in common
                for name in one[seed]
                if not name.startswith("seconds")
            ):
                found.append(row)
        return found

    @property
    def effects(self) -> list[Effect]:
        """The expectations of all rows with the measured differences."""
        rows, found = self.ablation.rows, []
        expected = {row.name: row.expects for row in rows.row}
        for row, other in rows.comparisons:
            for expectation in expected[row]:
                name = expectation.measure
                all_rows = [self.difference(*pair, name) for pair in rows.comparisons]
                effect = Effect(
                    row=row,
                    other=other,
                    expectation=expectation,
                    difference=self.difference(row, other, name),
                    noise=Noise.of(all_rows),
                )
                found.append(effect)
        return found


def collect(ablation: Ablation, failures: Sequence[RunFailure] = ()) -> AblationResult:
    """Read the results of the finished runs."""
    runs: dict[str, dict[int, RunRecords]] = {row.name: {} for row in ablation.rows.row}
    for run in ablation.runs:
        if run.state() == "finished":
            runs[run.row.name][run.seed] = RunRecords(run.folder)
    measured: dict[str, dict[int, Measured]] = {
        row: {seed: measure(run, ablation.rows.accuracy) for seed, run in by_seed.items()}
        for row, by_seed in runs.items()
    }
    return AblationResult(ablation=ablation, runs=runs, measured=measured, failures=failures)


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
        "rows": [
            {
                "name": row.name,
                "source": row.source,
                "config": row.config,
                "overrides": dict(leaves(ablation.rows.overrides_of(index))),
                "runs": {str(seed): dict(one) for seed, one in result.measured[row.name].items()},
                "measures": _spreads(partial(result.spread, row.name)),
            }
            for index, row in enumerate(ablation.rows.row)
        ],
        "differences": [
            {
                "row": row,
                "from": other,
                "measures": _spreads(partial(result.difference, row, other)),
            }
            for row, other in ablation.rows.comparisons
        ],
        "unchanged": result.unchanged,
        "effects": [
            {
                "row": effect.row,
                "from": effect.other,
                "expected": effect.expectation.model_dump(),
                "difference": effect.difference and asdict(effect.difference),
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


def _spreads(spread_of: Callable[[str], Spread | None]) -> dict[str, dict[str, Any] | None]:
    """Return the value of every measure as JSON values."""
    found = {measure.name: spread_of(measure.name) for measure in MEASURES}
    return {name: None if one is None else asdict(one) for name, one in found.items()}


JSON_FILE = "ablation.json"
MARKDOWN_FILE = "ablation.md"
PICTURE_FILE = "ablation.png"
MAX_BYTES = 8 * 2**20
"""Limit of compressed responses on the page, over all runs."""
PLUS_MINUS = "\u00b1"

Points = Iterable[tuple[int, float | None]]
"""Steps and values of a run."""


def write_reports(result: AblationResult, tables: Sequence[TextTable]) -> list[Path]:
    """Write all files into the ablation's folder and return their paths.

    Without a finished run these are only JSON and Markdown.
    """
    ablation = result.ablation
    seeds = count(len(ablation.seeds), "seed")
    title = f"Ablation {ablation.rows_file.stem}: {len(ablation.rows.row)} rows, {seeds}"
    paths = [ablation.folder / JSON_FILE, ablation.folder / MARKDOWN_FILE]
    is_drawn = bool(result.folders)
    picture = f"\n![Mean curves in bands of their standard errors]({PICTURE_FILE})\n" * is_drawn
    write_record(paths[0], to_json(result))
    replace_text(paths[1], markdown(title, tables) + picture, with_folder=True)
    if is_drawn:
        paths.append(ablation.folder / PICTURE_FILE)
        draw_rows(result, title, paths[-1])
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
    has_source = any(row.source for row in ablation.rows.row)
    note = (
        f"Mean {PLUS_MINUS} standard error over {count(num, 'seed')} "
        f"({', '.join(map(str, ablation.seeds))}), {ablation.runs[0].config.run.num_steps} steps "
        f"each, on {ablation.config}. Entropy (nats) and length (tokens) are means of the last "
        f"{END_STEPS} steps, shares and bounds of all steps, seconds without start and evaluation. "
        f"Steps, tokens and seconds to accuracy: to {ablation.rows.accuracy:g} held-out, as "
        "evaluations see it; (k/n): k of n runs reached it. Tokens include those of stopped "
        "groups. No signal: groups all correct or all incorrect, of those sampled and of those "
        "trained on."
    )
    short = [f"{row}: {len(runs)}" for row, runs in result.runs.items() if len(runs) < num]
    if short:
        note += f" Finished seeds of incomplete rows: {'; '.join(short)}."
    measures = _measured(result)
    rows = [
        [
            row.name,
            *(
                cell(result.spread(row.name, one.name), one.form, len(result.runs[row.name]))
                for one in measures
            ),
        ]
        + [row.source] * has_source
        for row in ablation.rows.row
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
                cell(result.difference(row, other, one.name), one.form, sign=True)
                for one in measures
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
    return [one for one in MEASURES if any(result.spread(row, one.name) for row in result.runs)]


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
            interval = " to ".join(format(bound, f"+{one.form}") for bound in effect.interval)
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
        form: format of a value, such as ".3f".
        num_runs: number of runs; None: not compared with the number of values.
        sign: show a plus sign.
    """
    if spread is None:
        return "-"
    parts = [format(spread.mean, f"+{form}" if sign else form)]
    if spread.standard_error is not None:
        parts += [PLUS_MINUS, format(spread.standard_error, form)]
    if num_runs is not None and spread.num < num_runs:
        parts.append(f"({spread.num}/{num_runs})")
    return " ".join(parts)


def markdown(title: str, tables: Sequence[TextTable]) -> str:
    """Return the tables as a Markdown page."""
    return "\n".join([f"# {title}", *(table.markdown() for table in tables)]) + "\n"


def _of(value: Callable[[MetricRecord], float | None]) -> Callable[[RunRecords], Points]:
    return lambda run: ((int(record["step"] or 0), value(record)) for record in run.steps)


def _metric(name: str) -> Callable[[RunRecords], Points]:
    return lambda run: run.series(name).items()


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


def draw_rows(result: AblationResult, title: str, output: Path) -> None:
    """Draw each row's mean over its seeds, in a band of its standard error, into a PNG.

    A row without finished runs is left out.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    drawn = [(name, runs.values()) for name, runs in result.runs.items() if runs]
    styled = [
        # rows that share a colour differ in their dashes
        (name, runs, COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)])
        for place, (name, runs) in enumerate(drawn)
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
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6))
        save(figure, output)


def _band(axes: Axes, runs: Sequence[Points], colour: str, dash: str) -> None:
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
