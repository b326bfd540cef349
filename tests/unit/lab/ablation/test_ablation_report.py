"""Would catch: a report that leaves out a row, a failure or an effect that was not shown, a cell
that breaks its table, a command that ends well although a run failed."""

from __future__ import annotations

import json
import re
from pathlib import Path

from megadapo.cli import main
from megadapo.commands.lab.ablate import fitting
from megadapo.lab.ablation.measures import MEASURES
from megadapo.lab.ablation.plan import Plan
from megadapo.lab.ablation.report import write_reports
from megadapo.lab.ablation.result import AblationResult, collect
from megadapo.lab.ablation.runner import Failure
from megadapo.lab.ablation.tables import ablation_tables, markdown
from megadapo.observe.report import TextTable
from tests.support import REPOSITORY
from tests.support.runs.ablations import ROWS, finish, plan_of
from tests.unit.observe.test_report import embedded


def finished(folder: Path) -> Plan:
    plan = plan_of(folder, num_seeds=3)
    for run in plan.runs:
        higher = "higher" in run.row.name
        noise = 0.001 * run.seed
        finish(run, accuracy=0.65 + 0.02 * run.seed, entropy=0.2 + noise + 0.1 * higher)
    return plan


def table_lines(page: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith("| ")]


def test_files_hold_every_row_difference_and_effect(tmp_path: Path) -> None:
    result = collect(finished(tmp_path))
    tables = ablation_tables(result)
    paths = write_reports(result, tables)
    assert [path.name for path in paths] == [
        *("ablation.json", "ablation.md", "ablation.png", "report.html")
    ]
    found = json.loads(paths[0].read_text())
    assert [row["name"] for row in found["rows"]] == ["plain", "+ clip | higher"]
    assert found["rows"][1]["measures"].keys() == {one.name for one in MEASURES}
    [effect] = found["effects"]
    assert effect["verdict"] == "higher, as said"
    assert abs(effect["difference"]["mean"] - 0.1) < 1e-9
    assert found["seeds"] == [1, 2, 3] and found["num_steps"] == 6
    page = embedded(paths[-1].read_text(), "data")
    assert [table["title"] for table in page["tables"]] == ["Rows", "Differences", "Effects"]
    assert len(page["runs"]) == 6


def test_a_markdown_cell_cannot_end_its_table(tmp_path: Path) -> None:
    page = markdown("Title", ablation_tables(collect(finished(tmp_path))))
    lines = table_lines(page)
    rows = [line for line in lines if line.startswith("| + ")]
    assert len(rows) == 3
    assert all("clip \\| higher" in line for line in rows)
    bars = [len(re.findall(r"(?<!\\)\|", line)) for line in lines]
    assert len(set(bars)) == 3, "one width for each of the three tables"


def test_numbers_stand_at_the_right_and_words_at_the_left(tmp_path: Path) -> None:
    """A missing number is no word; an interval begins with a number."""
    page = markdown("Title", ablation_tables(collect(finished(tmp_path))))
    _, _, effects = [line for line in table_lines(page) if line.startswith("| ---")]
    assert effects == "| --- | --- | ---: | ---: | --- | --- |"
    words, numbers = "| --- | --- |", "| --- | ---: |"
    for cells, expected in ((["-", "+0.1 \u00b1 0.2"], numbers), (["-", "Table 1: 30"], words)):
        table = TextTable(title="", note="", head=["row", "x"], rows=[["a", c] for c in cells])
        assert expected in markdown("Title", [table])


def test_steps_to_an_accuracy_say_how_many_runs_got_there(tmp_path: Path) -> None:
    """The mean of the runs that did would hide those that never do."""
    rows = ablation_tables(collect(finished(tmp_path)))[0]
    steps = rows.head.index("steps to accuracy")
    # 0.67, 0.69 and 0.71 at the last step
    assert [row[steps] for row in rows.rows] == ["6.0 (1/3)", "6.0 (1/3)"]


def test_a_row_that_changes_nothing_is_named(tmp_path: Path) -> None:
    """A difference of 0 +- 0 alone could be rounded; that the change never acted is said."""
    plan = plan_of(tmp_path, num_seeds=2)
    for number, run in enumerate(plan.runs):
        finish(run, entropy=0.2 + 0.01 * run.seed, seconds=1.0 + number)
    result = collect(plan)
    tables = ablation_tables(result)
    assert result.unchanged == ["+ clip | higher"]
    assert "+ clip | higher. What these rows change had nothing to act on." in tables[1].note
    assert tables[2].rows[0][4] == "not shown: no difference in any seed"
    other = tmp_path / "other"
    other.mkdir()
    assert "nothing to act on" not in ablation_tables(collect(finished(other)))[1].note


def test_failed_and_missing_runs_have_no_part_in_the_numbers(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    plan = plan_of(tmp_path)
    finish(plan.runs[0])
    failure = Failure(run=plan.runs[1], exit_code=6, message="an invariant | broke")
    result: AblationResult = collect(plan, [failure])
    rows, differences, effects, failures = ablation_tables(result)
    assert all(cell == "-" for cell in rows.rows[1][1:-1])
    assert rows.note.endswith("not finished: plain: 1; + clip | higher: 0.")
    assert "not finished" not in ablation_tables(collect(finished(tmp_path / "whole")))[0].note
    assert all(cell == "-" for cell in differences.rows[0][1:])
    assert effects.rows[0][4] == "not measured"
    assert failures.rows == [
        ["+ clip | higher, seed 1", "6", "an invariant | broke", str(plan.runs[1].log)]
    ]


def test_without_a_finished_run_there_is_a_report_but_no_picture(tmp_path: Path) -> None:
    result = collect(plan_of(tmp_path))
    paths = write_reports(result, ablation_tables(result))
    assert [path.suffix for path in paths] == [".json", ".md"]


def test_the_command_reports_what_is_finished_and_trains_nothing_twice(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    rows = tmp_path / "rows.toml"
    rows.write_text(ROWS)
    words = ["ablate", "configs/quickstart.toml", "--rows", str(rows), "--seeds", "1"]
    folder = ["--folder", str(tmp_path / "runs")]
    model = f"--model.path={REPOSITORY / 'configs' / 'quickstart-base'}"
    for run in plan_of(tmp_path, num_seeds=1).runs:
        finish(run)
    assert main([*words, *folder, model]) == 0
    assert "begins" not in capsys.readouterr().out
    assert (tmp_path / "runs" / "report.html").exists()
    assert main([*words, *folder, model, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("finished") == 2
    assert main([*words, *folder, "--seeds", "0"]) == 2


def test_the_committed_ablations_are_ready_to_run(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(REPOSITORY)
    files = sorted(Path("configs/ablations").glob("*.toml"))
    assert files
    for rows in files:
        words = ["ablate", "configs/quickstart.toml", "--rows", str(rows), "--dry-run"]
        assert main([*words, "--folder", str(tmp_path)]) == 0, capsys.readouterr().err


def test_a_wide_table_is_cut_into_some_that_fit_and_lose_nothing(tmp_path: Path) -> None:
    table = ablation_tables(collect(finished(tmp_path)))[0]
    assert fitting(table, 1000) == [table]
    pieces = fitting(table, 80)
    assert len(pieces) > 1
    assert [piece.head[0] for piece in pieces] == ["row"] * len(pieces)
    assert [name for piece in pieces for name in piece.head[1:]] == table.head[1:]
    for number, row in enumerate(table.rows):
        assert [cell for piece in pieces for cell in piece.rows[number][1:]] == row[1:]
    for piece in pieces:
        lines = [piece.head, *piece.rows]
        columns = zip(*lines, strict=True)
        assert sum(max(map(len, column)) + 2 for column in columns) <= 80
    assert [bool(piece.note) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    # what fits nowhere has a table of its own
    assert len(fitting(table, 1)) == len(table.head) - 1
