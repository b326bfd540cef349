"""The report has every row, failure and effect; measures and noise are over the seeds."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from megadapo.cli import main
from megadapo.lab.ablation.measures import (
    END_STEPS,
    MEASURES,
    Noise,
    Spread,
    difference,
    measure,
    trained_not_mixed_share,
)
from megadapo.lab.ablation.report import (
    AblationResult,
    Effect,
    ablation_tables,
    collect,
    markdown,
    write_reports,
)
from megadapo.lab.ablation.rows import Ablation, Expectation
from megadapo.lab.ablation.runner import RunFailure
from megadapo.observe.metrics.records import MetricsLog
from megadapo.observe.run_records import RunRecords
from megadapo.observe.tables import TextTable
from tests.support import REPOSITORY
from tests.support.runs.ablations import ROWS, ablation_of, finish


def finished(folder: Path) -> Ablation:
    ablation = ablation_of(folder, num_seeds=3)
    for run in ablation.runs:
        higher = "higher" in run.row.name
        noise = 0.001 * run.seed
        finish(run, accuracy=0.65 + 0.02 * run.seed, entropy=0.2 + noise + 0.1 * higher)
    return ablation


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> AblationResult:
    """Results of an ablation whose runs are all finished."""
    return collect(finished(tmp_path_factory.mktemp("finished")))


def table_lines(page: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith("| ")]


def test_files_hold_every_row_difference_and_effect(result):
    tables = ablation_tables(result)
    paths = write_reports(result, tables)
    names = ["ablation.json", "ablation.md", "ablation.png", "report.html"]
    assert [path.name for path in paths] == names
    found = json.loads(paths[0].read_text())
    assert [row["name"] for row in found["rows"]] == ["plain", "+ clip | higher"]
    assert found["rows"][1]["measures"].keys() == {one.name for one in MEASURES}
    [effect] = found["effects"]
    assert effect["verdict"] == "higher, as expected"
    assert abs(effect["difference"]["mean"] - 0.1) < 1e-9
    assert found["seeds"] == [1, 2, 3] and found["num_steps"] == 6
    (data,) = re.findall(r'<script[^>]*id="data"[^>]*>(.*?)</script>', paths[-1].read_text(), re.S)
    page = json.loads(data)
    assert [table["title"] for table in page["tables"]] == ["Rows", "Differences", "Effects"]
    assert len(page["runs"]) == 6


def test_markdown_cells_are_escaped(result):
    page = markdown("Title", ablation_tables(result))
    lines = table_lines(page)
    rows = [line for line in lines if line.startswith("| + ")]
    assert len(rows) == 3
    assert all("clip \\| higher" in line for line in rows)
    bars = [len(re.findall(r"(?<!\\)\|", line)) for line in lines]
    assert len(set(bars)) == 3, "one width for each of the three tables"


def test_numbers_are_aligned_right_and_words_left(result):
    page = markdown("Title", ablation_tables(result))
    _, _, effects = [line for line in table_lines(page) if line.startswith("| ---")]
    assert effects == "| --- | --- | ---: | ---: | --- | --- |"
    words, numbers = "| --- | --- |", "| --- | ---: |"
    for cells, expected in ((["-", "+0.1 \u00b1 0.2"], numbers), (["-", "Table 1: 30"], words)):
        table = TextTable(title="", note="", head=["row", "x"], rows=[["a", c] for c in cells])
        assert expected in markdown("Title", [table])


def test_steps_to_accuracy_count_the_runs_that_reached_it(result):
    rows = ablation_tables(result)[0]
    steps = rows.head.index("steps to accuracy")
    # 0.67, 0.69 and 0.71 at the last step
    assert [row[steps] for row in rows.rows] == ["6.0 (1/3)", "6.0 (1/3)"]


def test_bounds_are_shown_only_where_a_row_has_them(tmp_path):
    """Most ablations have no row with BAPO's gate."""
    ablation = finished(tmp_path)
    assert "BAPO's high" not in ablation_tables(collect(ablation))[0].head
    with MetricsLog(ablation.runs[0].folder) as log:
        log.record({"step": 7, "bapo/clip_low": 0.7, "bapo/clip_high": 1.4})
    rows, differences, *_ = ablation_tables(collect(ablation))
    for name, value in (("BAPO's low", "0.700"), ("BAPO's high", "1.400")):
        place = rows.head.index(name)
        assert [row[place] for row in rows.rows] == [f"{value} (1/3)", "-"]
        assert differences.rows[0][differences.head.index(name)] == "-"


def test_rows_with_identical_results_are_flagged(tmp_path, result):
    ablation = ablation_of(tmp_path, num_seeds=2)
    for number, run in enumerate(ablation.runs):
        finish(run, entropy=0.2 + 0.01 * run.seed, seconds=1.0 + number)
    same = collect(ablation)
    tables = ablation_tables(same)
    assert same.unchanged == ["+ clip | higher"]
    assert "+ clip | higher. Their change had no effect in these runs." in tables[1].note
    assert tables[2].rows[0][4] == "not shown: no difference in any seed"
    assert "no effect" not in ablation_tables(result)[1].note


def test_numbers_leave_out_failed_and_missing_runs(tmp_path, result):
    ablation = ablation_of(tmp_path)
    finish(ablation.runs[0])
    failure = RunFailure(run=ablation.runs[1], exit_code=6, message="an invariant | broke")
    rows, differences, effects, failures = ablation_tables(collect(ablation, [failure]))
    assert all(cell == "-" for cell in rows.rows[1][1:-1])
    assert rows.note.endswith("incomplete rows: plain: 1; + clip | higher: 0.")
    assert "incomplete" not in ablation_tables(result)[0].note
    assert all(cell == "-" for cell in differences.rows[0][1:])
    assert effects.rows[0][4] == "not measured"
    assert failures.rows == [
        ["+ clip | higher, seed 1", "6", "an invariant | broke", str(ablation.runs[1].log)]
    ]


def test_report_without_finished_runs_has_no_picture(tmp_path):
    result = collect(ablation_of(tmp_path))
    paths = write_reports(result, ablation_tables(result))
    assert [path.suffix for path in paths] == [".json", ".md"]


def test_command_reports_finished_runs_without_training(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    rows = tmp_path / "rows.toml"
    rows.write_text(ROWS)
    words = ["ablate", "configs/quickstart.toml", "--rows", str(rows), "--seeds", "1"]
    folder = ["--folder", str(tmp_path / "runs")]
    model = f"--model.path={REPOSITORY / 'configs' / 'quickstart-base'}"
    for run in ablation_of(tmp_path, num_seeds=1).runs:
        finish(run)
    assert main([*words, *folder, model]) == 0
    assert "starts" not in capsys.readouterr().out
    assert (tmp_path / "runs" / "report.html").exists()
    assert main([*words, *folder, model, "--dry-run"]) == 0
    assert capsys.readouterr().out.count(": finished, ") == 2
    assert main([*words, *folder, "--seeds", "0"]) == 2


@pytest.mark.slow
def test_committed_ablations_are_ready_to_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    files = sorted(Path("configs/ablations").glob("*.toml"))
    assert files
    for rows in files:
        words = ["ablate", "configs/quickstart.toml", "--rows", str(rows), "--dry-run"]
        assert main([*words, "--seeds=1", "--folder", str(tmp_path)]) == 0, capsys.readouterr().err


def test_comparison_of_teachers_is_ready_to_run(tmp_path, monkeypatch, capsys):
    """With its models in place, which are made by the commands of docs/stages.md."""
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    (tmp_path / "benchmarks").symlink_to(REPOSITORY / "benchmarks")
    (tmp_path / "runs").mkdir()
    for name in ("student", "teacher"):
        (tmp_path / "runs" / name).symlink_to(REPOSITORY / "configs" / "quickstart-base")
    monkeypatch.chdir(tmp_path)
    words = ["ablate", "configs/quickstart.toml", "--rows", "benchmarks/distillation.toml"]
    assert main([*words, "--dry-run", "--seeds=1"]) == 0, capsys.readouterr().err


def test_wide_tables_are_split_without_loss(result):
    table = ablation_tables(result)[0]
    whole = table.text().splitlines()
    parts = [part.splitlines() for part in table.text(80).split("\n\n")]
    assert len(parts) > 2 and parts[-1] == [table.note] and parts[0].pop(0) == table.title
    assert max(len(line) for part in parts[:-1] for line in part) <= 80
    for number in range(1 + len(table.rows)):
        first, *cells = (part[number] for part in parts[:-1])
        name = ["row", *(row[0] for row in table.rows)][number]
        assert all(one.startswith(name) for one in (first, *cells))
        joined = " ".join([first, *(one.removeprefix(name) for one in cells)])
        assert joined.split() == whole[1 + number].split()
    # a column wider than the screen is a part of its own
    assert len(table.text(1).split("\n\n")) == len(table.head)


def test_measures_follow_from_the_records(tmp_path):
    run = ablation_of(tmp_path).runs[0]
    finish(run, accuracy=0.9, entropy=0.25)
    found = measure(RunRecords(run.folder), 0.6)
    assert found.keys() == {one.name for one in MEASURES}
    assert (found["held_out_before"], found["held_out_after"]) == (0.0, 0.9)
    assert found["steps_to_accuracy"] == 4.0
    # four steps of 2 s, of 100 tokens and 20 of stopped groups, not all six
    assert (found["tokens_to_accuracy"], found["seconds_to_accuracy"]) == (480.0, 8.0)
    at_start, never = (measure(RunRecords(run.folder), accuracy) for accuracy in (0.0, 0.95))
    for name, start in (("steps", 0.0), ("tokens", 0.0), ("seconds", 0.0)):
        assert at_start[f"{name}_to_accuracy"] == start and never[f"{name}_to_accuracy"] is None
    assert found["entropy"] == 0.25
    assert found["response_length"] == 10.0 + sum(range(7 - END_STEPS, 7)) / END_STEPS
    assert found["no_signal"] == pytest.approx(sum(1 + step for step in range(1, 7)) / 8 / 6)
    assert found["no_signal_trained"] == pytest.approx(found["no_signal"])
    assert found["clip_low"] is None
    assert (found["tokens"], found["seconds"]) == (720.0, 12.0)


def test_reserved_and_selected_groups_count_as_mixed():
    record = {"groups/sampled": 20, "groups/all_correct": 9, "groups/all_wrong": 3}
    assert trained_not_mixed_share({**record, "groups/kept": 8}) == 0.0
    reserved = {**record, "groups/kept": 10, "groups/from_reserve": 2}
    assert trained_not_mixed_share(reserved) == 0.0
    assert trained_not_mixed_share({**record, "groups/kept": 20}) == pytest.approx(0.6)
    assert trained_not_mixed_share({**record, "groups/kept": 0}) is None


def test_spread_ignores_missing_seeds():
    assert Spread.of([]) is None
    assert Spread.of([None, None]) is None
    single = Spread.of([None, 3.0])
    assert single == Spread(mean=3.0, standard_error=None, num=1)
    three = Spread.of([1.0, 2.0, None, 6.0])
    assert three is not None and three.standard_error is not None
    assert (three.mean, three.num) == (3.0, 3)
    assert three.standard_error == pytest.approx(scipy.stats.sem([1.0, 2.0, 6.0]))


@pytest.mark.parametrize("num", [2, 3, 5, 11, 40])
def test_interval_of_one_comparison_is_students_or_wider(num):
    spread = Spread(mean=1.0, standard_error=0.5, num=num)
    exact = 0.5 * scipy.stats.t.ppf(0.975, num - 1)
    noise = Noise.of([spread])
    assert noise is not None and noise.num_free == num - 1
    low, high = noise.interval(spread)
    assert high - 1.0 == pytest.approx(1.0 - low)
    assert high - 1.0 >= exact - 5e-4
    if num <= 11:
        assert high - 1.0 == pytest.approx(exact, rel=1e-3)


def test_noise_is_pooled_over_comparisons():
    """The interval of two seeds that agree to five digits by chance would exclude 0."""
    agreed, others = [0.00091, 0.00092], ([0.0, -0.0014], [0.003, 0.001, 0.002], [0.0, 0.0], [1.0])
    spreads = [Spread.of(values) for values in (agreed, *others)]
    noise = Noise.of([*spreads, None])
    squares = sum(np.var(values) * len(values) for values in (agreed, *others[:2]))
    assert noise is not None and noise.num_free == 4
    assert noise.deviation == pytest.approx(math.sqrt(squares / 4))
    low, high = noise.interval(spreads[0])
    assert low < 0.0 < high
    assert high - low == pytest.approx(2 * 2.776 * noise.deviation / math.sqrt(2))
    assert Noise.of([Spread.of([0.0, 0.0]), Spread.of([1.0])]) is None


def test_row_that_scatters_more_has_its_own_interval():
    """Rows that agree made 0.035 of three seeds look certain, whose own error was 0.019."""
    wide, calm = Spread.of([0.0, 0.04, 0.07]), Spread.of([0.0, 0.001, 0.002])
    assert wide is not None and wide.standard_error is not None and calm is not None
    noise = Noise.of([wide, *[calm] * 9])
    assert noise is not None
    low, high = noise.interval(wide)
    assert high - low == pytest.approx(2 * 4.303 * wide.standard_error)
    assert noise.interval(calm)[1] - calm.mean > 4.303 * (calm.standard_error or 0.0)


def test_differences_are_paired_by_seed():
    first = {1: {"x": 1.0}, 2: {"x": 5.0}, 4: {"x": 9.0}}
    second = {2: {"x": 5.5}, 1: {"x": 1.5}, 7: {"x": 0.0}}
    found = difference(second, first, "x")
    assert found == Spread(mean=0.5, standard_error=0.0, num=2)


@pytest.mark.parametrize("late", [{3: {"x": None}}, {3: {}}])
def test_missing_seed_leaves_no_difference(late):
    first = {1: {"x": 8.0}, 3: {"x": 12.0}}
    second = {1: {"x": 4.0}, **late}
    assert difference(second, first, "x") is None and difference(first, second, "x") is None


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([None, None], "not measured"),
        ([0.4], "not shown: one seed has no standard error"),
        ([0.4, 0.1], "not shown: the 95 % interval includes 0"),
        ([0.4, 0.4, 0.41], "higher, as expected"),
        ([-0.4, -0.4, -0.41], "lower, the opposite"),
        ([0.0, 0.0], "not shown: no difference in any seed"),
    ],
)
def test_verdict_claims_no_more_than_the_interval(values, verdict):
    effect = Effect(
        row="b",
        other="a",
        expectation=Expectation(measure="entropy", change="higher"),
        difference=Spread.of(values),
        noise=Noise.of([Spread.of(values)]),
    )
    assert effect.verdict == verdict
    assert not math.isnan(effect.difference.mean if effect.difference else 0.0)
