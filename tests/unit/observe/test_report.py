"""The report runs no foreign script, hides no spike or broken bound, and stays bounded."""

import base64
import gzip
import hashlib
import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest

from megadapo.cli import main
from megadapo.errors import DataError
from megadapo.observe.metrics.records import MetricRecord
from megadapo.observe.report import page as report
from megadapo.observe.report.page import judge, read_runs, read_series, render, script_json
from megadapo.observe.report.responses import MAX_COLUMNS, SavedRun, read_responses
from megadapo.observe.rollouts.files import (
    HELD_OUT_FOLDER,
    rollouts_path,
    step_file,
    write_rollouts,
)
from megadapo.observe.rollouts.saved_group import SavedGroup
from tests.support.rollout.saved_groups import awkward_group, saved_group, saved_response, untrained
from tests.support.runs.recorded_runs import record_run


def save(folder: Path, *groups: SavedGroup) -> None:
    steps = {group.step for group in groups}
    for step in steps:
        path = rollouts_path(folder, step)
        write_rollouts(path, [group for group in groups if group.step == step])


def unpacked(chunk: str) -> dict[str, object]:
    return json.loads(gzip.decompress(base64.b64decode(chunk)))


def scripts(page: str) -> list[tuple[str, str]]:
    return re.findall(r"<script([^>]*)>(.*?)</script>", page, re.DOTALL)


def embedded(page: str, name: str) -> object:
    [text] = [text for attributes, text in scripts(page) if f'id="{name}"' in attributes]
    return json.loads(text)


def test_policy_allows_exactly_the_scripts_and_the_style_of_the_page(tmp_path):
    page = render([record_run(tmp_path, num_steps=2)])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    directives = dict(part.strip().split(" ", 1) for part in policy[1].split(";"))
    code = [text for attributes, text in scripts(page) if "application/json" not in attributes]
    styles = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert (len(code), len(styles)) == (2, 1)

    def hashes(texts: list[str]) -> set[str]:
        digests = (hashlib.sha256(text.encode()).digest() for text in texts)
        return {f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests}

    assert set(directives.pop("script-src").split()) == hashes(code)
    assert set(directives.pop("style-src").split()) == hashes(styles)
    assert directives == {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'"}


def test_page_names_nothing_to_load_and_no_markup_from_strings(tmp_path):
    page = render([record_run(tmp_path, num_steps=1)])
    assert not re.search(r"<(?:link|img|iframe|script[^>]* src|base)\b", page)
    assert not re.search(r"url\(|@import", page)
    own = scripts(page)[-1][1]
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert unsafe not in own, unsafe


def test_every_style_variable_is_defined_once(tmp_path):
    page = render([record_run(tmp_path, num_steps=1)])
    defined = re.findall(r"^  (--[a-z0-9-]+):", page, re.MULTILINE)
    assert len(defined) == len(set(defined)) > 20
    assert set(re.findall(r"var\((--[a-z0-9-]+)\)", page)) <= set(defined)


@pytest.mark.parametrize(
    "text", ["</script><b>", "<!--<script", "a&lt;b", "\u2028\u2029", "\ud800"]
)
def test_script_json_has_nothing_that_html_or_a_script_would_read(text):
    safe = script_json({"text": [text]})
    assert safe.isascii() and not set("<>&") & set(safe)
    assert json.loads(safe) == {"text": [text]}


def test_hostile_text_stays_in_its_json(tmp_path):
    hostile = "</script><script>alert(1)</script>\u2028{{script}}{{data}}"
    folder = record_run(tmp_path / "run", num_steps=1)
    (folder / "config.json").write_text(json.dumps({"model": {"path": hostile}}))
    save(folder, saved_group(saved_response(hostile)), awkward_group(9))
    page = render([folder])
    assert len(scripts(page)) == 4 and "alert(1)" not in page.replace("alert(1)\\u003c", "")
    assert embedded(page, "data")["runs"][0]["config"]["model.path"] == hostile
    assert unpacked(embedded(page, "chunks")[0])["responses"][0]["text"] == hostile


def test_thinned_curve_keeps_every_spike_and_counts_what_is_not_finite():
    values = [1.0] * 5000
    values[1234], values[4321], values[100] = 99.0, -99.0, math.nan
    records: list[MetricRecord] = [
        {"step": step, "policy_version": step, "policy/loss": value}
        for step, value in enumerate(values, start=1)
    ]
    curves = read_series(records)
    assert list(curves) == ["policy/loss"]
    curve = curves["policy/loss"]
    points = dict(zip(curve.steps, curve.values, strict=True))
    assert points[1235] == 99.0 and points[4322] == -99.0
    assert len(points) <= report.MAX_POINTS and curve.steps == sorted(curve.steps)
    assert (curve.num_measured, curve.num_not_finite) == (5000, 1)


def test_phases_of_a_long_run_are_known_at_the_same_steps():
    """Each phase was thinned to its own steps, and drawn as 0 s at those of the others."""
    names = ("time/rollout_s", "time/train_s", "time/sync_s", "time/step_s")
    records: list[MetricRecord] = [
        {"step": step, **{name: float((step * (n + 7)) % 13) for n, name in enumerate(names)}}
        for step in range(1, 2002)
    ]
    records[1500]["time/sync_s"] = 500.0
    curves = read_series(records)
    steps = {tuple(curves[name].steps) for name in names}
    assert len(steps) == 1 and len(curves["time/sync_s"].steps) <= 2000
    assert 500.0 in curves["time/sync_s"].values


def test_metrics_are_optional_and_unknown_ones_are_kept():
    records: list[MetricRecord] = [
        {"step": 1, "accuracy/mean": None, "reward/shaped_mean": 0.5},
        {"step": 2, "reward/shaped_mean": math.inf},
    ]
    curves = read_series(records)
    assert list(curves) == ["reward/shaped_mean"]
    assert curves["reward/shaped_mean"].values == [0.5, None]


def verdict(records: list[MetricRecord], bounds: dict[str, object], key: str) -> report.Verdict:
    return next(found for found in judge(records, bounds) if found.key == key)


def gap(step: int, value: float | None, **more: float) -> MetricRecord:
    return {"step": step, "parity/logprob_abs_max": value, "staleness/token_share": 0.0, **more}


def test_oracles_show_the_worst_step_and_one_broken_step_among_many():
    records = [gap(step, 2e-5 if step == 700 else 1e-6) for step in range(1, 1001)]
    found = verdict(records, {"logprob_abs_max": 1e-5}, "logprob_abs_max")
    assert (found.status, found.worst, found.worst_step) == ("broken", "2e-5", 700)
    assert found.cells.count(0) == 1 and len(found.cells) == report.MAX_CELLS
    assert verdict(records, {"logprob_abs_max": 2e-5}, "logprob_abs_max").status == "held"
    assert verdict(records, {}, "logprob_abs_max").status == "no bound"


def test_oracles_take_nan_for_the_worst_and_leave_out_what_the_run_leaves_out():
    records = [gap(1, 1e-9), gap(2, math.nan), gap(3, None, **{"staleness/token_share": 1.0})]
    found = verdict(records, {"logprob_abs_max": 1e-5}, "logprob_abs_max")
    assert (found.status, found.worst, found.worst_step) == ("broken", "nan", 2)
    assert found.cells == [1, 0, -1]
    assert verdict([gap(1, None)], {"logprob_abs_max": 1.0}, "logprob_abs_max").status == (
        "not measured"
    )


def test_oracle_that_ended_the_run_by_a_missing_value_is_broken():
    """It was shown as held, over the last step of a run that it had ended."""
    records = [gap(1, 1e-9), gap(2, None)]
    found = verdict(records, {"logprob_abs_max": 1e-5}, "logprob_abs_max")
    assert (found.status, found.cells) == ("broken", [1, 0])


def test_skipped_updates_break_their_bound_only_in_a_row():
    def skips(*counts: int) -> list[MetricRecord]:
        return [{"step": i, "policy/skipped_updates": n} for i, n in enumerate(counts, start=1)]

    held = verdict(skips(1, 1, 0, 1, 0), {}, "skipped updates")
    assert (held.status, held.worst) == ("held", "2 in a row")
    broken = verdict(skips(0, 1, 2, 1, 0), {}, "skipped updates")
    assert (broken.status, broken.worst_step, broken.cells) == ("broken", 4, [1, 1, 1, 0, 1])


def test_distributions_count_every_response_once():
    counts = SavedRun()
    counts.add(1, [0, 7, 999], [True, False, False])
    counts.add(1, [50, 50, 51], [True, True, True])
    counts.add(9, [1000, 1, 2], [False, False, False])
    length = counts.length()
    assert length.columns == [(1, 1), (9, 9)]
    assert [sum(rows) for rows in length.counts] == [6, 3]
    assert length.edges[0] == 0 and length.edges[-1] > 1000
    width = length.edges[1]
    assert length.counts[0][int(50 // width)] == 3
    accuracy = counts.accuracy()
    assert accuracy.counts == [[0, 1, 0, 1], [1, 0, 0, 0]]


def test_distributions_of_many_steps_share_columns():
    counts = SavedRun()
    for step in range(1, 3 * MAX_COLUMNS):
        counts.add(step, [1], [True])
    heat = counts.length()
    assert len(heat.columns) <= MAX_COLUMNS and heat.columns[0] == (1, 3)
    assert sum(map(sum, heat.counts)) == 3 * MAX_COLUMNS - 1


def test_held_out_groups_are_listed_and_not_counted(tmp_path):
    save(tmp_path, saved_group(step=2))
    held_out = saved_group(step=2, disposition="held_out")
    write_rollouts(step_file(tmp_path / HELD_OUT_FOLDER, 2), [held_out])
    saved = read_responses([tmp_path])
    assert [one.disposition for one in saved.contents()[0]] == ["trained", "held_out"]
    assert saved.runs[0].num_groups == 1


def test_saved_groups_come_through_and_are_listed(tmp_path):
    cut = untrained("x" * 40, finish_reason="length", correct=False, symbolic_correct=True)
    save(tmp_path, saved_group(saved_response(), cut, step=2, prompt_index=5), awkward_group(6))
    saved = read_responses([tmp_path])
    (entry, *_), chunks = saved.contents()
    found = (entry.step, entry.prompt_index, entry.prompt_id, entry.excerpt)
    assert found == (2, 5, "id-5", "1+1=?")
    assert (entry.correct, entry.truncated) == ([True, False], [False, True])
    assert entry.disagreed == [False, True]
    first, second = unpacked(chunks[0])["responses"]
    assert first["tokens"] == list("1 + 1 = 2") and len(first["logprobs_update"]) == 9
    assert second["logprobs_old"] is None and second["text"] == "x" * 40
    awkward = unpacked(chunks[1])["responses"]
    assert awkward[0]["tokens"] == [] and awkward[1]["logprobs_rollout"][0] is None
    assert (saved.runs[0].num_groups, saved.runs[0].num_responses) == (2, 5)


def test_too_many_groups_leave_some_of_every_step(tmp_path):
    groups = [
        saved_group(step=step, prompt_index=100 * step + i)
        for step in (1, 2, 3)
        for i in range(step * 4)
    ]
    save(tmp_path, *groups)
    whole = read_responses([tmp_path])
    limit = sum(map(len, whole.contents()[1])) // 2
    part = read_responses([tmp_path], max_bytes=limit)
    entries, chunks = part.contents()
    assert sum(map(len, chunks)) <= limit
    assert min(Counter(entry.step for entry in entries).values()) >= 3
    assert len(entries) < part.runs[0].num_groups == 24
    assert part.runs[0].length() == whole.runs[0].length()


def test_too_many_steps_leave_some_of_the_whole_run(tmp_path):
    """The oldest steps were left out, so the page showed only the end of a long run."""
    for step in range(1, 33):
        save(tmp_path, saved_group(step=step, prompt_index=step))
    size = max(map(len, read_responses([tmp_path]).contents()[1]))
    entries, _ = read_responses([tmp_path], max_bytes=10 * size).contents()
    assert [one.step for one in entries] == list(range(1, 33, 4))


def test_damaged_file_is_named(tmp_path):
    folder = record_run(tmp_path / "run", num_steps=1)
    (folder / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config\.json cannot be read as JSON"):
        render([folder])
    with pytest.raises(DataError, match="no steps are recorded"):
        render([tmp_path / "nowhere"])


def test_runs_of_the_same_name_get_different_ones(tmp_path):
    folders = [record_run(tmp_path / name / "run", num_steps=1) for name in ("a", "b")]
    assert [run.name for run in read_runs(folders)] == ["a/run", "b/run"]
    same = read_runs([folders[0], folders[0]])
    assert len({run.name for run in same}) == 2


def test_command_writes_into_the_run_or_where_it_is_told(tmp_path, capsys):
    folder = record_run(tmp_path / "run", num_steps=2)
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    other = tmp_path / "made" / "two.html"
    assert main(["report", str(folder), str(folder), "--output", str(other)]) == 0
    assert other.read_text().startswith("<!doctype html>")
    assert main(["report", str(folder), "--output", str(folder)]) == 5
    assert "cannot be written" in capsys.readouterr().err
    assert not [*tmp_path.rglob("*.part")]
