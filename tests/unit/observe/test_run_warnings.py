"""A run that gets worse has a warning wherever people look, and a healthy one has none."""

import io
import json
import math
from collections.abc import Sequence

import pytest
from rich.console import Console

from megadapo.cli import main
from megadapo.observe.metrics.records import EvaluationRecord, MetricRecord, MetricsLog
from megadapo.observe.report.page import render
from megadapo.observe.run_records import RunRecords
from megadapo.observe.run_warnings import run_warnings
from megadapo.observe.summary import print_report
from megadapo.run.run import Run
from tests.support.runs.recorded_runs import evaluation_record, record_run
from tests.support.runs.runs_alone import config_of

ONE_TEXT = "groups/one_text_wrong"
UNEQUAL = "groups/rejected_unequal"


def steps(num_steps: int = 3, **values: float | None) -> list[MetricRecord]:
    """Return steps with 40 sampled groups each."""
    return [{"groups/sampled": 40, **values, "step": step} for step in range(1, num_steps + 1)]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({ONE_TEXT: 21}, "63 of 120 groups of steps 1 to 3 have one text"),
        ({UNEQUAL: 30}, "90 of 120 groups of steps 1 to 3 were left out"),
        (
            {"reward/judge/failed": 0.03, "environment/Sum/failed": 0.5, "reward/f/failed": 0.01},
            "reward/judge/failed is 3.0%, environment/Sum/failed is 50.0% in steps 1 to 3",
        ),
    ],
)
def test_steps_cause_one_warning_of_their_kind(values, text):
    [found] = run_warnings(steps(**values), [])
    assert found.startswith(text)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {ONE_TEXT: 20, UNEQUAL: 20, "reward/judge/failed": 0.02},
        {ONE_TEXT: 40, UNEQUAL: 40, "groups/sampled": None},
        dict.fromkeys((ONE_TEXT, UNEQUAL, "reward/judge/failed", "groups/sampled")),
        dict.fromkeys((ONE_TEXT, UNEQUAL, "reward/judge/failed"), math.nan),
        {"groups/all_correct": 40, "groups/equal": 40},
    ],
)
def test_healthy_and_unmeasured_steps_cause_none(values):
    assert run_warnings(steps(**values), []) == []
    assert run_warnings([], []) == []


def test_only_the_last_steps_count():
    """A run that has recovered would be called broken for ever."""
    healed = [*steps(30, **{ONE_TEXT: 40}), *steps(10, **{ONE_TEXT: 0})]
    assert run_warnings(healed, []) == []


# fmt: off
QUICKSTART = (
    [0.222, 0.221, 0.222, 0.183, 0.181, 0.162, 0.128, 0.108, 0.100, 0.092, 0.087, 0.073, 0.077,
     0.058, 0.061, 0.056, 0.047, 0.049, 0.048, 0.042, 0.048, 0.047, 0.037, 0.036, 0.039, 0.042,
     0.037, 0.037, 0.035, 0.034],
    [0.342, 0.330, 0.324, 0.409, 0.413, 0.492, 0.561, 0.640, 0.644, 0.661, 0.704, 0.754, 0.750,
     0.822, 0.826, 0.838, 0.810, 0.899, 0.857, 0.851, 0.864, 0.861, 0.895, 0.889, 0.867, 0.898,
     0.877, 0.880, 0.905, 0.871],
)
"""Entropy and accuracy of a run of configs/quickstart.toml, seed 1."""
# fmt: on
FALL = [0.6] * 10 + [0.5 - 0.04 * step for step in range(10)]
FLAT = [0.40, 0.42, 0.38, 0.41] * 5


def entropy_run(
    entropy: Sequence[float | None], level: Sequence[float | None], name: str = "accuracy/mean"
) -> list[MetricRecord]:
    return [
        {"step": step, "policy/entropy": own, name: value}
        for step, (own, value) in enumerate(zip(entropy, level, strict=True), start=1)
    ]


@pytest.mark.parametrize(
    ("records", "text"),
    [
        (entropy_run(FALL, FLAT), "policy/entropy fell from 0.600 to 0.220 while"),
        (entropy_run(FALL, FLAT, "reward/mean"), "policy/entropy fell from 0.600 to 0.220 while"),
        (entropy_run([0.2] * 15 + [0.0] * 5, FLAT), "policy/entropy fell from 0.200 to 0.000"),
        (
            entropy_run([0.2] * 20 + [0.3] * 10 + [0.45] * 10, FLAT * 2),
            "policy/entropy rose from 0.200 in steps 1 to 5 to 0.450 while the policy got no "
            "better in steps 21 to 40",
        ),
    ],
)
def test_entropy_that_leaves_its_range_without_progress_is_warned_of(records, text):
    [found] = run_warnings(records, [])
    assert found.startswith(text)


@pytest.mark.parametrize(
    "records",
    [
        # too few steps, a fall that stays above half, a slow rise, one that pays
        entropy_run(FALL[1:], FLAT[1:]),
        entropy_run([0.6] * 10 + [0.31] * 10, FLAT),
        entropy_run([0.2] * 20 + [0.39] * 20, FLAT * 2),
        entropy_run([0.2] * 20 + [0.6] * 20, [*FLAT, *[0.4 + 0.01 * step for step in range(20)]]),
        # nothing left to find
        entropy_run(FALL, [0.93] * 20),
        # unknown progress, and an entropy that was not measured
        entropy_run(FALL, [None] * 20),
        entropy_run(FALL, [math.nan] * 20),
        entropy_run([None, math.nan] * 10, FLAT),
    ],
)
def test_healthy_and_unmeasured_entropy_causes_none(records):
    assert run_warnings(records, []) == []


def bapo(num_steps: int, **values: float | None) -> list[MetricRecord]:
    names = {"clip_low": 0.6, "clip_high": 1.2, "share_before": 0.75, "share": 0.75} | values
    return steps(num_steps, **{f"bapo/{name}": value for name, value in names.items()})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "BAPO's bounds were 0.6 and 1.2 in every update of steps 1 to 10"),
        ({"clip_low": 0.9, "clip_high": 3.0, "share": 0.8}, "before its search, 0.80 after it"),
    ],
)
def test_bounds_of_bapo_that_never_move_are_warned_of(values, text):
    """The run would be taken for BAPO, and be one with fixed bounds."""
    equal_rewards = bapo(1, share_before=None, share=None)
    [found] = run_warnings(equal_rewards + bapo(10, **values), [])
    assert text in found


@pytest.mark.parametrize(
    "records",
    [bapo(9), bapo(9) + bapo(1, clip_high=1.25), bapo(10, clip_low=None)],
)
def test_bounds_that_move_or_are_not_measured_cause_no_warning(records):
    assert run_warnings(records, []) == []


def test_quickstart_never_has_a_warning_although_its_entropy_falls_by_half():
    records = entropy_run(*QUICKSTART)
    assert [text for end in range(31) for text in run_warnings(records[:end], [])] == []
    plateau = entropy_run(QUICKSTART[0], FLAT + FLAT[:10])
    assert run_warnings(plateau[:24], []) != []


def evaluations(
    *values: tuple[float | None, float | None], samples: int = 4, problems: Sequence[int] = (35, 35)
) -> list[EvaluationRecord]:
    """Return evaluations of (avg@k, pass@k), 10 steps apart."""
    return [
        evaluation_record(
            10 * number,
            accuracy,
            standard_error=0.05,
            samples_per_problem=samples,
            num_problems=problems[number % 2],
            pass_at={} if solved is None else {str(samples): solved},
        )
        for number, (accuracy, solved) in enumerate(values)
    ]


def test_fall_of_pass_at_k_beside_a_rise_names_the_evaluation_that_it_fell_from():
    """Accuracy alone shows progress while a policy answers every problem alike."""
    [found] = run_warnings([], evaluations((0.157, 0.371), (0.243, 0.257)))
    assert found.startswith(
        "held-out pass@4 fell from 0.371 (step 0) to 0.257 (step 10) while avg@4 rose from 0.157"
    )
    [found] = run_warnings([], evaluations((0.1, 0.4), (0.2, 0.8), (0.4, 0.42)))
    assert "pass@4 fell from 0.800 (step 10) to 0.420 (step 20)" in found


@pytest.mark.parametrize(
    "found",
    [
        evaluations((0.2, 0.4)),
        evaluations((0.309, 0.9), (0.7, 0.984), (0.896, 1.0)),
        evaluations((0.309, 0.9), (0.36, 0.8)),
        evaluations((0.309, 0.9), (0.2, 0.5)),
        # two of 64 problems are chance
        evaluations((0.7, 1.0), (0.9, 0.969), problems=(64, 64)),
        # the best of several is high by chance
        evaluations((0.1, 0.4), (0.2, 0.5), (0.4, 0.37)),
        evaluations((0.157, 0.371), (0.3, 0.257), problems=(35, 70)),
        evaluations((0.3, 0.3), (0.5, 0.5), samples=1),
        evaluations((0.1, None), (0.9, None)),
        evaluations((None, 0.9), (None, 0.1)),
        evaluations((0.1, math.nan), (0.9, 0.1)),
        evaluations((0.1, 0.9), (0.9, math.nan)),
    ],
)
def test_chance_healthy_and_unmeasured_evaluations_cause_none(found):
    assert run_warnings([], found) == []


def test_error_of_sets_is_that_of_the_smallest():
    """One problem of eight would count as one of 508."""
    sets = {"large": {"num_problems": 500.0}, "small": {"num_problems": 8.0}}
    before, after = (
        evaluation_record(
            step, accuracy, num_problems=508, pass_at={"8": solved}, sets=sets, standard_error=0.0
        )
        for step, accuracy, solved in ((0, 0.3, 0.5), (10, 0.4, 0.4375))
    )
    assert run_warnings([], [before, after]) == []


@pytest.fixture
def folder(tmp_path):
    """A run in whose third step most groups are one incorrect text."""
    folder = tmp_path / "run"
    with Run.open(config_of(folder)) as run:
        record_run(folder, num_steps=2)
        with MetricsLog(folder) as log:
            log.record({"step": 3, "groups/sampled": 100, "groups/kept": 10, ONE_TEXT: 95})
        run.complete(3, {})
        yield folder


def test_each_place_shows_a_warning_once(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    capsys.readouterr()
    shown = [render([folder]), render([folder, folder])]
    for command in (["status"], ["status", "--json"], ["top", "--once"]):
        assert main([command[0], str(folder), *command[1:]]) == 0
        shown.append(capsys.readouterr().out)
    out = io.StringIO()
    print_report(folder, console=Console(file=out, width=80))
    last = out.getvalue().splitlines()[-1]
    assert last.startswith("warning: 96 of 180 groups of steps 1 to 3 have one text")
    shown.append(out.getvalue())
    counts = [text.count("groups of steps 1 to 3 have one text") for text in shown]
    assert counts == [1, 2, 1, 1, 1, 1]


def test_steps_that_a_resumed_run_repeats_cause_no_warning(folder):
    with MetricsLog(folder) as log:
        log.rewind(2)
    assert RunRecords(folder).warnings == []


@pytest.mark.parametrize("file", ["metrics.jsonl", "evaluations.jsonl"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_damaged_files_do_not_hide_the_state(folder, file, is_folder, capsys):
    """Whether a driver is alive has nothing to do with its metrics."""
    (folder / file).unlink()
    if is_folder:
        (folder / file).mkdir()
    else:
        (folder / file).write_text("not json\n")
    capsys.readouterr()
    assert main(["status", str(folder), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["state"] == "running"
    [warning] = status["warnings"]
    assert file in warning and ("directory" if is_folder else "not valid JSON") in warning
