"""`megadapo new` with rows and a reward of a user, and two steps of its recipe."""

import csv

import pytest

from megadapo.config import load_config
from megadapo.data.arithmetic import generate
from megadapo.observe.metrics.records import read_evaluations
from tests.support import REPOSITORY
from tests.support.runs.whole_runs import megadapo, metrics

pytestmark = pytest.mark.timeout(600)
REWARD = """def near(response: str, ground_truth: str) -> float:
    digits = response.rpartition("Answer:")[2].strip()
    return 1.0 / (1.0 + abs(int(digits) - int(ground_truth))) if digits.isdigit() else 0.0
"""


@pytest.mark.slow
def test_new_recipe_trains_on_own_rows(tmp_path, monkeypatch):
    (tmp_path / "graded.py").write_text(REWARD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with (tmp_path / "sums.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["number", "sum_problem", "gold_value"])
        rows = [(one.text, one.answer) for one in generate("train", 200, 1)]
        writer.writerows([(number, *row) for number, row in enumerate(rows)])
    recipe, folder = tmp_path / "own.toml", tmp_path / "run"
    told = megadapo(
        *("new", REPOSITORY / "configs/quickstart-base", tmp_path / "sums.csv"),
        *("--reward", "graded:near", "--output", recipe, f"--run.folder={folder}"),
    ).stdout
    assert "128 samples of the base model" in told and f"Next: megadapo train {recipe}" in told
    config = load_config(recipe)
    assert (config.data.columns.prompt, config.data.columns.ground_truth) == (
        "sum_problem",
        "gold_value",
    )
    # its answers in steps have 26 to 28 tokens
    assert config.rollout.max_response_tokens == 48
    short = ["--run.num_steps=2", "--trainer.optimizer.warmup_steps=1", "--evaluation.every=2"]
    megadapo("train", recipe, *short, "--sampling.prompts_per_step=16")
    assert [record["policy/ratio_first_max_error"] for record in metrics(folder)] == [0.0, 0.0]
    assert [one.num_problems for one in read_evaluations(folder)] == [20, 20]
