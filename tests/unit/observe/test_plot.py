"""A plot shows all that was measured, of short and odd runs too."""

import math
from pathlib import Path

import pytest
from matplotlib.image import imread

from megadapo.cli import main
from megadapo.errors import DataError, InfraError
from megadapo.observe.metrics.records import MetricsLog
from megadapo.observe.plot import COLOURS, draw_runs, plot_run, plot_runs
from megadapo.observe.run_records import RunRecords
from tests.support.runs.recorded_runs import record_run


def drawn(*folders):
    return draw_runs([RunRecords(folder) for folder in folders]).axes


@pytest.mark.parametrize("num_steps", [1, 2, 60])
def test_every_panel_shows_a_run_of_any_length(tmp_path, num_steps):
    folder = record_run(tmp_path / "run", num_steps=num_steps)
    assert plot_run(folder) == folder / "plot.png"
    assert imread(folder / "plot.png").shape[1] == 2275
    for axes in drawn(folder):
        # a line through one point is seen by its marker alone
        seen = [line for line in axes.lines if num_steps > 1 or line.get_marker() != "None"]
        assert seen == list(axes.lines) != [], axes.get_title("left")


def test_runs_drawn_over_each_other_are_all_seen(tmp_path):
    runs = [record_run(tmp_path / name, num_steps=n) for name, n in (("a", 8), ("b", 30))]
    assert plot_runs(runs, tmp_path / "deep" / "both.png").exists()
    for axes in drawn(*runs):
        assert {line.get_color() for line in axes.lines} == set(COLOURS[:2])


def test_lines_of_one_run_have_their_own_colours(tmp_path):
    for axes in drawn(record_run(tmp_path, num_steps=3)):
        lines = [
            line for line in axes.lines if line.get_label() not in ("each step", "the last step")
        ]
        assert len({line.get_color() for line in lines}) == len(lines)


def test_band_is_filled_over_the_steps_that_have_both_metrics(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.record(
                {"step": step, "tokens/generated": 9, "tokens/trained": 5 if step > 1 else None}
            )
    [axes] = drawn(tmp_path)
    [area] = axes.collections
    assert area.get_label() == "not trained on"
    points = area.get_paths()[0].vertices
    assert (points[:, 0].min(), points[:, 1].min(), points[:, 1].max()) == (2, 5, 9)


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
