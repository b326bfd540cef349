"""The examples, as a newcomer copies and starts them."""

import json
import shutil
import subprocess
import sys

from megadapo.config import load_config
from megadapo.config.preflight import check_run
from megadapo.lab.plan.cards import H100
from megadapo.lab.plan.fit import problems
from megadapo.lab.plan.phases import models_of
from tests.support import REPOSITORY

EXAMPLES = REPOSITORY / "examples"


def test_own_data_is_prepared_and_accepted(tmp_path):
    folder = tmp_path / "own_data"
    shutil.copytree(EXAMPLES / "own_data", folder, ignore=shutil.ignore_patterns("*.jsonl"))
    subprocess.run([sys.executable, folder / "prepare.py"], check=True)
    parts = {name: (folder / f"{name}.jsonl").read_text() for name in ("train", "held_out")}
    rows = [json.loads(line) for text in parts.values() for line in text.splitlines()]
    questions = [row["question"] for row in rows]
    assert len(set(questions)) == len(questions) == 256
    overrides = [f"data.{name}={folder / name}.jsonl" for name in parts]
    config = load_config(EXAMPLES / "own_data" / "recipe.toml", overrides)
    assert not [line for line in check_run(config) if "data." in line]


def test_own_reward_is_imported_in_its_worker(monkeypatch):
    monkeypatch.chdir(EXAMPLES / "own_reward")
    config = load_config("recipe.toml")
    assert [one.function for one in config.reward.functions] == ["my_rewards:short_and_right"]
    check_run(config)


def test_one_gpu_recipe_fits_in_every_phase():
    config = load_config(EXAMPLES / "one_gpu" / "recipe.toml")
    assert problems(config, models_of(config), H100) == []
