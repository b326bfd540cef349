"""The plot shows each measured panel once, and a metric without values has none."""

import json
import math
import re
from pathlib import Path

import pytest
from matplotlib.image import imread

from megadapo.cli import main
from megadapo.errors import DataError, InfraError
from megadapo.observe.metrics.names import METRIC_NAMES, METRICS
from megadapo.observe.metrics.records import MetricsLog
from megadapo.observe.panels import HELD_OUT, PANELS, sections_with_values
from megadapo.observe.plot import COLOURS, PLOT_FILE, draw_runs, plot_runs, save
from megadapo.observe.report.page import render
from megadapo.observe.run_records import RunRecords
from tests.support.runs.recorded_runs import evaluation_record, record_run


def drawn(*folders):
    return draw_runs([RunRecords(folder) for folder in folders]).axes


def test_every_panel_shows_a_run_of_one_step(tmp_path):
    """A line through one point is seen by its marker alone, and lines by their own colours."""
    figure = draw_runs([RunRecords(record_run(tmp_path / "run", num_steps=1))])
    for axes in figure.axes:
        assert axes.lines, axes.get_title("left")
        assert all(line.get_marker() != "None" for line in axes.lines), axes.get_title("left")
        lines = [
            line for line in axes.lines if line.get_label() not in ("each step", "the last step")
        ]
        assert len({line.get_color() for line in lines}) == len(lines)


@pytest.mark.slow
def test_every_panel_shows_runs_drawn_over_each_other(tmp_path):
    runs = [record_run(tmp_path / name, num_steps=n) for name, n in (("a", 8), ("b", 30))]
    figure = draw_runs([RunRecords(folder) for folder in runs])
    save(figure, tmp_path / "both.png")
    assert imread(tmp_path / "both.png").shape[1] == 2275
    for axes in figure.axes:
        assert {line.get_color() for line in axes.lines} == set(COLOURS[:2])


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


def test_values_that_are_missing_zero_or_not_finite_do_not_break_the_plot(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step, value in enumerate([0.0, math.nan, None, math.inf, 0.0], start=1):
            log.record(
                {"step": step, "policy/entropy": value, "parity/logprob_abs_max": 0.0}
                | {"accuracy/mean": value, "parity/logprob_abs_mean": value}
            )
    assert plot_runs([tmp_path], tmp_path / PLOT_FILE).stat().st_size > 0


def test_run_without_steps_is_a_clear_error(tmp_path, capsys):
    with pytest.raises(DataError, match="no steps are recorded"):
        plot_runs([tmp_path], tmp_path / PLOT_FILE)
    (tmp_path / "metrics.jsonl").write_text("")
    assert main(["plot", str(tmp_path)]) == 3
    assert str(tmp_path) in capsys.readouterr().err
    assert not (tmp_path / "plot.png").exists()


def test_plot_command_says_where_the_plot_is(tmp_path, capsys):
    """A run of one step has a log axis, a band and a curve of evaluations of one point."""
    run = recorded(
        tmp_path / "run",
        steps=1,
        **{"parity/logprob_abs_max": 1e-6, "tokens/generated": 9, "tokens/trained": 5},
    )
    with MetricsLog(run) as log:
        log.record_evaluation(evaluation_record(1))
    assert main(["plot", str(run)]) == 0
    assert Path(capsys.readouterr().out.strip()) == run / "plot.png"
    assert (run / "plot.png").exists()


def test_more_runs_than_colours_in_a_new_folder(tmp_path):
    runs = [recorded(tmp_path / f"{i}", **{"policy/entropy": 0.5}) for i in range(len(COLOURS) + 1)]
    plot = tmp_path / "new" / "many.png"
    assert main(["plot", *map(str, runs), "--output", str(plot)]) == 0
    assert plot.exists()


def test_unwritable_output_is_a_clear_error(tmp_path):
    run = recorded(tmp_path / "run", **{"policy/entropy": 0.5})
    (tmp_path / "file").write_text("")
    with pytest.raises(InfraError, match="cannot be written"):
        plot_runs([run], tmp_path / "file" / "plot.png")


OPTIONAL = {
    "Left out by max_kl": {"policy/left_out_updates": 0},
    "KL to the reference": {"kl/mean": 0.1},
    "Coefficient of the KL": {"kl/coef": 0.001},
    "BAPO's bounds": {"bapo/clip_low": 0.8, "bapo/clip_high": 1.2},
    "BAPO's positive tokens": {"bapo/share": 0.4},
    "Explained variance": {"critic/explained_variance": 0.5},
    "Critic's loss": {"critic/loss": 0.5},
    "Values and returns": {"critic/value_mean": 0.5},
    "Tool calls": {"tools/calls_per_response": 1.5},
    "Branches": {"tools/branches_per_group": 2.0},
    "Rise of entropy after a call": {"tools/entropy_rise": 0.1},
    "Pretraining loss": {"pretraining/loss": 2.0},
    "Balance loss of experts": {"experts/balance_loss": 1.0},
    "Largest expert load": {"experts/max_load": 1.5},
    "Groups without signal": {"groups/all_correct_share": 0.1, "groups/all_wrong_share": 0.2},
    "KL of old to new policy": {"policy/approx_kl": 1e-4},
}
"""Panels, and values with which they appear."""


def recorded(folder, *, steps=3, **values):
    with MetricsLog(folder) as log:
        for step in range(1, steps + 1):
            log.record({"step": step, "policy_version": step} | values)
    return folder


def shown(folder):
    """Return the titles of a run's panels in plot.png, and of its panels in the report."""
    plotted = [axes.get_title("left") for axes in draw_runs([RunRecords(folder)]).axes]
    [data] = re.findall(r'id="data"[^>]*>(.*?)</script>', render([folder]), re.DOTALL)
    reported = [panel["title"] for _, panels in json.loads(data)["sections"] for panel in panels]
    return plotted, reported


@pytest.mark.parametrize("title", OPTIONAL)
def test_panel_appears_in_both_if_its_metrics_have_values(tmp_path, title):
    plotted, reported = shown(recorded(tmp_path, **OPTIONAL[title]))
    assert plotted == [title] and reported == [title]


def test_length_against_held_out_accuracy_needs_an_accuracy(tmp_path):
    """An evaluation by a judge has a score alone, and the axis would have no values."""
    title = "Length, held out"
    measured = recorded(tmp_path / "a", **{"eval/response_length": 9.0, "eval/accuracy": 0.5})
    assert shown(measured) == ([title], [title])
    # the axis of the report's panel
    assert '"eval/accuracy":{"steps":[' in render([measured])
    judged = recorded(tmp_path / "b", **{"eval/response_length": 9.0})
    with MetricsLog(judged) as log:
        log.record_evaluation(evaluation_record(1, accuracy=None, score=0.5))
    assert title not in shown(judged)[0] + shown(judged)[1]


def test_run_without_their_values_has_no_other_panel(tmp_path):
    entropy = recorded(tmp_path / "entropy", **{"policy/entropy": 0.5})
    assert shown(entropy) == (["Entropy"], ["Entropy"])
    assert shown(recorded(tmp_path / "nothing")) == ([], [])


def test_only_measured_lines_of_a_panel_are_drawn(tmp_path):
    """A null line in the legend would promise a curve."""
    folder = recorded(tmp_path, **{"critic/value_mean": 0.5})
    [axes] = draw_runs([RunRecords(folder)]).axes
    assert [line.get_label() for line in axes.lines] == ["value"]


def test_panels_appear_if_one_of_several_runs_has_values(tmp_path):
    plain = recorded(tmp_path / "plain", **{"policy/entropy": 0.5})
    critic = recorded(tmp_path / "critic", **{"critic/loss": 0.5})
    figure = draw_runs([RunRecords(folder) for folder in (plain, critic)])
    assert [axes.get_title("left") for axes in figure.axes] == ["Entropy", "Critic's loss"]


def test_every_metric_has_a_panel_or_a_phase():
    """A metric that no panel names is drawn last, without title and unit."""
    own = ["reward/judge", "held_out/aime24/accuracy"]
    found = dict(sections_with_values([*METRIC_NAMES, HELD_OUT, *own]))
    assert "Other metrics" not in found
    assert [panel.lines for panel in found["Learning"] if panel.rest_of] == [
        {"held_out/aime24/accuracy": "aime24/accuracy"},
        {"reward/judge": "judge"},
    ]


def test_environments_have_a_panel_for_each_unit():
    """Seconds would hide returns on the same axis; "Sum/returned" is no return."""
    counted = ("return", "turns", "seconds", "failed", "failures/timeout", "failures/lost_process")
    counted += ("not_a_number", "api/calls", "returned")
    names = [f"environment/{label}/{name}" for label in ("Sum", "Web-1") for name in counted]
    [(heading, panels)] = sections_with_values(names)
    assert heading == "Environments"
    assert {panel.title: list(panel.lines.values()) for panel in panels} == {
        "Return": ["Sum", "Web-1"],
        "Turns": ["Sum", "Web-1"],
        "Time": ["Sum", "Web-1"],
        "Failures": ["Sum", "Web-1"],
        "Causes of failures": [
            f"{label}/failures/{kind}"
            for label in ("Sum", "Web-1")
            for kind in ("timeout", "lost process")
        ],
        "Counts": [
            f"{label}/{name}"
            for label in ("Sum", "Web-1")
            for name in ("not a number", "api/calls", "returned")
        ],
    }


def test_unknown_metric_has_its_own_panel():
    [(heading, [panel])] = sections_with_values(["other/loss"])
    assert (heading, panel.lines) == ("Other metrics", {"other/loss": "other/loss"})


def test_panels_refer_to_known_metrics_and_differ():
    """A misspelt name is a panel that never appears."""
    assert all({*panel.band[:2]} <= panel.lines.keys() for panel in PANELS)
    referred = {panel.against for panel in PANELS if panel.against}
    assert referred | {name for panel in PANELS for name in panel.lines} == METRICS.keys()
    titles = [(panel.title, panel.unit) for panel in PANELS]
    assert len(set(titles)) == len(titles)
