"""`import megadapo`: rows, functions and configurations as objects, up to the start of a run."""

import json
import math

import pytest

import megadapo
from megadapo.api import checked_config
from megadapo.cli import main
from megadapo.config import to_dict
from megadapo.data.sources import read_rows
from megadapo.errors import ConfigError, DataError
from megadapo.observe.rollouts.files import rollouts_path, write_rollouts
from tests.support.processes.running import heavy_imports
from tests.support.rollout.saved_groups import saved_group
from tests.support.runs.recorded_runs import record_run

QUICKSTART = "configs/quickstart.toml"
ROWS = [
    {"prompt": "12+34+56=?", "answer": "102", "data_source": "sums", "level": 1},
    {"prompt": "Größe?", "answer": 7, "data_source": "sums", "level": 2},
]


def brevity(response):
    return -float(len(response))


def test_importing_megadapo_and_a_configuration_is_fast():
    program = f"import megadapo; megadapo.load_config({QUICKSTART!r})"
    assert heavy_imports(program) == []
    assert {"train", "evaluate", "load_config", "RunFolder"} <= {*dir(megadapo)}


def test_configuration_of_a_table_with_values_by_dotted_key(tmp_path):
    table = {"run": {"folder": "r", "num_steps": 9}, "model": {"path": "m"}, "data": {"train": "t"}}
    functions = ["rule", {"function": "format", "weight": 0.5}]
    overrides = {"run.folder": tmp_path, "data.held_out": None, "reward.functions": functions}
    config = megadapo.load_config(table, {**overrides, "trainer.optimizer.lr": 2e-5})
    assert (config.run.folder, config.data.held_out) == (tmp_path, None)
    assert megadapo.load_config(config, {"run.num_steps": 3}).run.num_steps == 3
    assert config.trainer.optimizer.lr == 2e-5 and config.reward.functions[1].weight == 0.5
    with pytest.raises(ConfigError, match=r"^the configuration.*: run\.num_step: unknown key"):
        megadapo.load_config(table, {"run.num_step": 3})


def test_given_rows_and_functions_are_those_of_the_run(tmp_path):
    reward = ["rule", {"function": lambda response: 1.0, "weight": 0.25}, brevity]
    folder = tmp_path / "run"
    overrides = {"run.folder": folder}
    config = checked_config(QUICKSTART, overrides, reward, None, iter(ROWS), ROWS)
    assert folder.stat().st_mode & 0o77 == 0
    read = [row.columns for row in read_rows(config.data.train)]
    assert read == ROWS and [row.columns for row in read_rows(config.data.held_out)] == ROWS
    rule, by_value, imported = config.reward.functions
    assert (rule.function, imported.function) == ("rule", f"{__name__}:brevity")
    assert (by_value.label, by_value.weight) == ("lambda", 0.25)
    assert "lambda response: 1.0" in (folder / by_value.function.partition(":")[0]).read_text()
    rows = folder / "inputs" / "train.jsonl"
    assert checked_config(config, (), None, None, rows, None) == config


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"train": [*ROWS, "text"]}, "train, row 2 is no mapping"),
        ({"held_out": [{"prompt": "a", "answer": math.nan}]}, "held_out, row 0 .*JSON compliant"),
        ({"train": []}, "data.train = .* holds no rows"),
        ({"train": [{"prompt": "a"}]}, "train.jsonl.*ground_truth"),
        ({"reward": lambda text: 1.0}, "lambda.*text"),
        ({"reward": {"function": brevity, "wieght": 1.0}}, "reward.functions.*wieght"),
        ({"environment": brevity}, "has no class brevity"),
    ],
)
def test_unusable_objects_are_refused_before_anything_starts(tmp_path, given, error):
    with pytest.raises((ConfigError, DataError), match=error):
        megadapo.train(QUICKSTART, overrides={"run.folder": tmp_path / "run"}, **given)
    assert not (tmp_path / "run" / "log.txt").exists()


def test_command_line_refuses_a_function_by_value_but_reads_its_run(tmp_path, capsys):
    """It would have to unpickle what anybody may have written."""
    name = "inputs/mine-0123abcd.py:mine"
    overrides = {"run.folder": tmp_path, "reward.functions": [name]}
    config = to_dict(megadapo.load_config(QUICKSTART, overrides))
    record_run(tmp_path, num_steps=2)
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_rollouts(rollouts_path(tmp_path, 2), [saved_group(step=2)])
    for command in ("train", "eval"):
        assert main([command, str(tmp_path)]) == ConfigError.exit_code
        assert "from Python, with megadapo.train(..., reward=...)" in capsys.readouterr().err
    assert main(["show", str(tmp_path)]) == main(["report", str(tmp_path)]) == 0
    assert main(["config", str(tmp_path), "--diff", QUICKSTART]) == 0
    assert name in capsys.readouterr().out
    run = megadapo.RunFolder(str(tmp_path))
    assert [record["step"] for record in run.metrics()] == [1, 2]
    assert [one.step for one in run.evaluations()] == [0, 1, 2]
    (response, *_) = run.responses()
    assert (response["text"], response["ground_truth"]) == ("1 + 1 = 2", "2")
