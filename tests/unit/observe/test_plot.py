"""A plot shows all that was measured, of short and odd runs too."""

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from megadapo.cli import main
from megadapo.errors import DataError, InfraError
from megadapo.observe.metrics.records import MetricsLog
from megadapo.observe.plot import COLOURS, plot_run, plot_runs
from tests.support.runs.recorded_runs import record_run


def panels_with_colour(png: Path, colour: str) -> int:
    pixels = imread(png)[..., :3]
    wanted = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    near = np.abs(pixels - wanted).max(axis=-1) < 0.02
    rows, columns = near.shape
    cells = [
        near[i * rows // 3 : (i + 1) * rows // 3, j * columns // 4 : (j + 1) * columns // 4]
        for i in range(3)
        for j in range(4)
    ]
    return sum(bool(cell.sum() > 20) for cell in cells)


@pytest.mark.parametrize("num_steps", [1, 2, 60])
def test_every_panel_shows_a_run_of_any_length(tmp_path, num_steps):
    png = plot_run(record_run(tmp_path / "run", num_steps=num_steps))
    assert png == tmp_path / "run" / "plot.png"
    assert panels_with_colour(png, COLOURS[0]) == 12


def test_runs_drawn_over_each_other_are_all_seen(tmp_path):
    runs = [record_run(tmp_path / name, num_steps=n) for name, n in (("a", 8), ("b", 30))]
    png = plot_runs(runs, tmp_path / "deep" / "both.png")
    assert panels_with_colour(png, COLOURS[1]) == 12
    assert panels_with_colour(png, COLOURS[0]) >= 1


def test_more_runs_than_colours(tmp_path):
    runs = [record_run(tmp_path / f"{i}", num_steps=2) for i in range(len(COLOURS) + 1)]
    assert plot_runs(runs, tmp_path / "many.png").exists()


def test_values_that_are_missing_zero_or_not_finite_do_not_break_the_plot(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step, value in enumerate([0.0, math.nan, None, math.inf, 0.0], start=1):
            log.record(
                {"step": step, "policy/entropy": value, "parity/logprob_abs_max": 0.0}
                | {"accuracy/mean": value, "parity/logprob_abs_mean": value}
            )
    assert plot_run(tmp_path).stat().st_size > 0


def test_run_without_steps_is_a_clear_error(tmp_path, capsys):
    with pytest.raises(DataError, match="nothing to plot"):
        plot_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    assert main(["plot", str(tmp_path)]) == 3
    assert str(tmp_path) in capsys.readouterr().err
    assert not (tmp_path / "plot.png").exists()


def test_plot_command_says_where_the_plot_is(tmp_path, capsys):
    run = record_run(tmp_path / "run", num_steps=3)
    assert main(["plot", str(run)]) == 0
    assert Path(capsys.readouterr().out.strip()) == run / "plot.png"
    assert main(["plot", str(run), str(run), "--output", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").exists()


def test_unwritable_output_is_a_clear_error(tmp_path):
    run = record_run(tmp_path / "run", num_steps=2)
    (tmp_path / "file").write_text("")
    with pytest.raises(InfraError, match="cannot be written"):
        plot_runs([run], tmp_path / "file" / "plot.png")
