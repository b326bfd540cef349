"""Results of an ablation: measures of each row over its seeds, differences, and effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megadapo.lab.ablation.measures import (
    MEASURES,
    Measure,
    Measured,
    Noise,
    Spread,
    difference,
    measure,
)
from megadapo.lab.ablation.rows import Ablation, AblationRow, Expectation, flat
from megadapo.lab.ablation.runner import RunFailure


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
        "overrides": flat(result.ablation.rows.overrides_of(index)),
        "runs": {str(seed): dict(measured) for seed, measured in row.runs.items()},
        "measures": {measure.name: _spread_json(row.spread(measure.name)) for measure in MEASURES},
    }


def _spread_json(spread: Spread | None) -> dict[str, Any] | None:
    return None if spread is None else asdict(spread)
