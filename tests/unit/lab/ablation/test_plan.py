"""Would catch: a run that trains something else than its row says, that is trained twice, or whose
folder's older run enters the table; a failure that ends the others or is not told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megadapo.config import load_config
from megadapo.errors import ConfigError, DataError
from megadapo.lab.ablation.plan import PlannedRun
from megadapo.lab.ablation.runner import Runner
from tests.support.runs.ablations import ROWS, finish, plan_of


def test_each_run_is_its_row_with_its_seed_and_its_command_says_the_same(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "--trainer.optimizer.lr=1e-5")
    assert [(run.row.name, run.seed) for run in plan.runs] == [
        ("plain", 1),
        ("+ clip | higher", 1),
        ("plain", 2),
        ("+ clip | higher", 2),
    ]
    last = plan.runs[-1]
    assert last.folder == tmp_path / "runs" / "clip-higher" / "seed-2"
    assert last.config.sampling.selection == "all"
    assert last.config.algorithm.objective.clip_high == 0.3
    assert last.config.trainer.optimizer.lr == 1e-5
    assert last.config.run.num_steps == 6
    recipe, *words = last.command[last.command.index("train") + 1 :]
    assert load_config(recipe, words) == last.config


def test_a_rows_own_recipe_takes_the_place_of_the_commands(tmp_path: Path) -> None:
    quickstart = Path("configs/quickstart.toml").resolve()
    (tmp_path / "own.toml").write_text(
        f'extends = "{quickstart}"\n[algorithm]\nnormalize_by_std = false\n'
    )
    rows = '[[row]]\nname = "a"\n[[row]]\nname = "b"\nconfig = "own.toml"\n'
    first, second = plan_of(tmp_path, rows=rows, num_seeds=1).runs
    assert first.config.algorithm.normalize_by_std
    assert not second.config.algorithm.normalize_by_std


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("--algorithm.objective.clip_high=0.5", "rows differ in algorithm.objective.clip_high"),
        ("--algorithm.objective={clip_low = 0.1}", "rows differ in algorithm.objective.clip_high"),
        ("--run.folder=elsewhere", "set by the ablation"),
        ("--sampling.mod=sync", "sampling.mode"),
    ],
)
def test_an_override_that_spoils_the_comparison_is_refused(
    tmp_path: Path, override: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_of(tmp_path, override)


def test_an_override_of_a_key_in_which_the_rows_recipes_differ_is_refused(tmp_path: Path) -> None:
    """As when rows set it: the recipes would no longer be what they are named."""
    for name, selection in (("all", "all"), ("signal", "signal")):
        quickstart = Path("configs/quickstart.toml").resolve()
        (tmp_path / f"{name}.toml").write_text(
            f'extends = "{quickstart}"\n[sampling]\nselection = "{selection}"\n'
        )
    rows = "".join(f'[[row]]\nname = "{n}"\nconfig = "{n}.toml"\n' for n in ("all", "signal"))
    with pytest.raises(ConfigError, match=r"rows differ in sampling\.selection"):
        plan_of(tmp_path, "--sampling.selection=signal", rows=rows)
    runs = plan_of(tmp_path, "--sampling.responses_per_prompt=4", rows=rows).runs
    assert {run.config.sampling.responses_per_prompt for run in runs} == {4}


def test_a_row_that_cannot_run_is_named_before_anything_starts(tmp_path: Path) -> None:
    impossible = ROWS.replace("clip_high = 0.3", "ratio = 'none'")
    with pytest.raises(ConfigError, match=r"clip \| higher.*gate"):
        plan_of(tmp_path, rows=impossible)
    missing = '[[row]]\nname = "lost"\noverrides.data.train = "nowhere.parquet"\n'
    with pytest.raises(DataError, match=r"'lost'.*nowhere"):
        plan_of(tmp_path, rows=missing)


def test_what_a_folder_holds_decides_what_is_left_to_do(tmp_path: Path) -> None:
    run = plan_of(tmp_path).runs[0]
    assert run.standing() == "new"
    finish(run)
    assert run.standing() == "finished"
    # another command of the same configuration finds it as it is
    again = plan_of(tmp_path).runs[0]
    assert again.standing() == "finished"
    metrics = run.folder / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    assert run.standing() == "begun"


def test_a_folder_with_another_configuration_is_not_mixed_in(tmp_path: Path) -> None:
    finish(plan_of(tmp_path).runs[0])
    plan_of(tmp_path)
    with pytest.raises(ConfigError, match=r"trainer.optimizer.lr = 3e-05, not 1e-05"):
        plan_of(tmp_path, "--trainer.optimizer.lr=1e-5")


def test_a_failed_run_is_named_and_ends_no_other(tmp_path: Path) -> None:
    """Whole processes, which end at their recipe; a finished run is not started at all."""
    plan = plan_of(tmp_path)
    finished, *others = plan.runs
    finish(finished)
    broken = tmp_path / "broken.toml"
    broken.write_text("[run]\nfoldr = 3\n")
    runs: list[PlannedRun] = [finished, *(replace(run, recipe=str(broken)) for run in others)]
    others[0].log.parent.mkdir(parents=True, exist_ok=True)
    others[0].log.write_text("megadapo: what an earlier process ended with\n")
    said: list[str] = []
    failures = Runner(jobs=2, say=said.append).train(runs)
    assert sorted(failure.run.name for failure in failures) == sorted(run.name for run in others)
    for failure in failures:
        assert failure.exit_code == ConfigError.exit_code
        assert "run.foldr" in failure.run.log.read_text()
        assert "broken.toml" in failure.message
    assert "earlier process" in others[0].log.read_text()
    assert not any(finished.name + " begins" in line for line in said)
    assert json.loads((finished.folder / "config.json").read_text())
