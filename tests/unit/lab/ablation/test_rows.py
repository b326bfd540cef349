"""Rows add up as written, invalid files are refused, and overrides survive the command line."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from megadapo.config import load_config
from megadapo.config.recipe import parse_override
from megadapo.errors import ConfigError, DataError
from megadapo.lab.ablation.rows import RowRun, RowsFile, arguments, read_rows
from megadapo.lab.ablation.runner import train_runs
from megadapo.observe.run_records import leaves
from tests.support.runs.ablations import ROWS, ablation_of, finish

TWO_CHANGES = """
cumulative = {cumulative}
overrides = {{ run.num_steps = 6, sampling.selection = "all" }}
[[row]]
name = "a"
overrides.algorithm.objective.clip_high = 0.2
[[row]]
name = "b"
overrides.algorithm = {{ objective.clip_high = 0.3, overlong_buffer = 0 }}
[[row]]
name = "c"
overrides.sampling.selection = "signal"
"""


def rows_of(text: str) -> RowsFile:
    return RowsFile.model_validate(tomllib.loads(text))


def test_only_cumulative_rows_add_up():
    added, alone = (rows_of(TWO_CHANGES.format(cumulative=word)) for word in ("true", "false"))
    assert dict(leaves(added.overrides_of(2))) == {
        "run.num_steps": 6,
        "sampling.selection": "signal",
        "algorithm.objective.clip_high": 0.3,
        "algorithm.overlong_buffer": 0,
    }
    two = {"run.num_steps": 6, "sampling.selection": "signal"}
    assert dict(leaves(alone.overrides_of(2))) == two
    assert added.comparisons == [("b", "a"), ("c", "b")]
    assert alone.comparisons == [("b", "a"), ("c", "a")]


def test_overrides_mean_the_same_on_the_command_line():
    table = {"a": {"b": {"text": "7", "quoted": 'a"b\\ = c', "none": "none"}, "n": 3e-5}}
    table["a"] |= {"list": ["x", "true"], "flag": False}
    parsed = {".".join(keys): value for keys, value, _ in map(parse_override, arguments(table))}
    assert parsed == dict(leaves(table))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "row"),
        ("row = []", "row"),
        ('[[row]]\nname = "x"\nsauce = "y"', "sauce"),
        ('[[row]]\nname = "A b"\n[[row]]\nname = "a  b"', "rename"),
        ('[[row]]\nname = "+"', "letter"),
        ('[[row]]\nname = "x"\noverrides.run.seed = 3', "run.seed"),
        ('cumulative = true\n[[row]]\nname = "x"\nconfig = "y.toml"', "cumulative"),
        ('[[row]]\nname = "x"\nexpects = [{measure = "joy", change = "higher"}]', "joy"),
        ('[[row]]\nname = "x"\nexpects = [{measure = "entropy", change = "up"}]', "change"),
        ("[[row", "not valid TOML"),
    ],
)
def test_invalid_file_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "rows.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_rows(path)
    assert str(path) in str(error.value)


def test_overrides_win_over_extended_recipes(tmp_path):
    (tmp_path / "base.toml").write_text(
        '[run]\nfolder = "r"\nnum_steps = 40\n[model]\npath = "m"\n[data]\ntrain = "d"\n'
    )
    (tmp_path / "deep").mkdir()
    over = tmp_path / "deep" / "over.toml"
    over.write_text('extends = "../base.toml"\n[algorithm.objective]\nclip_high = 0.5\n')
    words = arguments({"algorithm": {"objective": {"clip_low": 0.1}}})
    objective = load_config(over, words).algorithm.objective
    assert (objective.clip_low, objective.clip_high) == (0.1, 0.5)


def test_run_and_its_command_have_the_row_and_the_seed(tmp_path):
    runs = ablation_of(tmp_path, "--trainer.optimizer.lr=1e-5").runs
    names = ("plain", "+ clip | higher")
    expected = [(name, seed) for seed in (1, 2) for name in names]
    assert [(run.row.name, run.seed) for run in runs] == expected
    last = runs[-1]
    assert last.folder == tmp_path / "runs" / "clip-higher" / "seed-2"
    assert last.config.sampling.selection == "all"
    assert last.config.algorithm.objective.clip_high == 0.3
    assert last.config.trainer.optimizer.lr == 1e-5
    assert last.config.run.num_steps == 6
    recipe, *words = last.command[last.command.index("train") + 1 :]
    assert load_config(recipe, words) == last.config


def write_recipe(path, section, setting):
    quickstart = Path("configs/quickstart.toml").resolve()
    path.write_text(f'extends = "{quickstart}"\n[{section}]\n{setting}\n')


def test_row_recipe_replaces_the_commands(tmp_path):
    write_recipe(tmp_path / "own.toml", "algorithm", "normalize_by_std = false")
    rows = '[[row]]\nname = "a"\n[[row]]\nname = "b"\nconfig = "own.toml"\n'
    first, second = ablation_of(tmp_path, rows=rows, num_seeds=1).runs
    assert first.config.algorithm.normalize_by_std
    assert not second.config.algorithm.normalize_by_std


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--algorithm.objective.clip_high=0.5", "rows differ in algorithm.objective.clip_high"),
        ("--algorithm.objective={clip_low = 0.1}", "rows differ in algorithm.objective.clip_high"),
        ("--run.folder=elsewhere", "set by the ablation"),
        ("--sampling.mod=sync", "sampling.mode"),
    ],
)
def test_override_that_spoils_the_comparison_is_refused(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        ablation_of(tmp_path, override)


def test_override_of_a_key_that_differs_between_recipes_is_refused(tmp_path):
    for name in ("all", "signal"):
        write_recipe(tmp_path / f"{name}.toml", "sampling", f'selection = "{name}"')
    rows = "".join(f'[[row]]\nname = "{n}"\nconfig = "{n}.toml"\n' for n in ("all", "signal"))
    with pytest.raises(ConfigError, match=r"rows differ in sampling\.selection"):
        ablation_of(tmp_path, "--sampling.selection=signal", rows=rows)
    runs = ablation_of(tmp_path, "--sampling.responses_per_prompt=4", rows=rows).runs
    assert {run.config.sampling.responses_per_prompt for run in runs} == {4}


def test_invalid_row_is_named_before_the_start(tmp_path):
    impossible = ROWS.replace("clip_high = 0.3", "ratio = 'none'")
    with pytest.raises(ConfigError, match=r"clip \| higher.*gate"):
        ablation_of(tmp_path, rows=impossible)
    missing = '[[row]]\nname = "lost"\noverrides.data.train = "nowhere.parquet"\n'
    with pytest.raises(DataError, match=r"'lost'.*nowhere"):
        ablation_of(tmp_path, rows=missing)


def test_state_follows_the_folder(tmp_path):
    run = ablation_of(tmp_path).runs[0]
    assert run.state() == "new"
    finish(run)
    assert run.state() == "finished"
    assert ablation_of(tmp_path).runs[0].state() == "finished"
    metrics = run.folder / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    assert run.state() == "started"


def test_folder_with_another_configuration_is_refused(tmp_path):
    finish(ablation_of(tmp_path).runs[0])
    ablation_of(tmp_path)
    with pytest.raises(ConfigError, match=r"trainer.optimizer.lr = 3e-05, not 1e-05"):
        ablation_of(tmp_path, "--trainer.optimizer.lr=1e-5")


def test_failed_run_is_named_and_ends_no_other(tmp_path):
    finished, *others = ablation_of(tmp_path).runs
    finish(finished)
    broken = tmp_path / "broken.toml"
    broken.write_text("[run]\nfoldr = 3\n")
    runs: list[RowRun] = [finished, *(replace(run, recipe=str(broken)) for run in others)]
    others[0].log.parent.mkdir(parents=True, exist_ok=True)
    others[0].log.write_text("megadapo: an earlier process\n")
    shown: list[str] = []
    failures = train_runs(runs, jobs=2, show=shown.append)
    assert sorted(failure.run.name for failure in failures) == sorted(run.name for run in others)
    for failure in failures:
        assert failure.exit_code == ConfigError.exit_code
        assert "run.foldr" in failure.run.log.read_text()
        assert "broken.toml" in failure.message
    assert "earlier process" in others[0].log.read_text()
    assert not any(finished.name + " starts" in line for line in shown)
    assert json.loads((finished.folder / "config.json").read_text())
