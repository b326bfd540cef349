"""A reward model's run: exported, continued and used as a reward."""

import json
import random

import numpy as np
import pytest
from transformers import AutoTokenizer

from megadapo.data import arithmetic
from megadapo.data.prompts import Prompt
from megadapo.rewards.config import RewardFunction
from megadapo.rewards.function_runners import start_runner
from tests.support.runs.whole_runs import megadapo, metrics

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.fixture
def pairs(tmp_path):
    """Worked sums, and the same with an answer off by one character: a short task."""
    rng, path = random.Random(1), tmp_path / "pairs.jsonl"
    rows = []
    for problem in arithmetic.from_source("arithmetic:train:96"):
        chosen = arithmetic.worked_answer(problem, rng, kind="steps")
        prompt = problem.row()["prompt"]
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": chosen[:-1] + "x"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(folder, pairs, *overrides, num_steps=12):
    megadapo(
        *("reward-model", "configs/quickstart.toml", f"--run.folder={folder}"),
        *(f"--data.train={pairs}", f"--data.held_out={pairs}", f"--run.num_steps={num_steps}"),
        *("--supervised.rows_per_update=16", "--trainer.optimizer.lr=3e-4"),
        *("--evaluation.every=4", "--checkpoint.every=4", *overrides),
    )


def test_reward_model_learns_scores_and_starts_another(pairs, tmp_path):
    whole = tmp_path / "whole"
    train(whole, pairs)
    steps = metrics(whole)
    assert steps[-1]["eval/pair_accuracy"] > 0.95 > steps[0]["pairs/accuracy"]
    assert steps[3]["eval/loss"] > steps[-1]["eval/loss"]
    model = tmp_path / "reward-model"
    assert "--runner pooling" in megadapo("export", whole, model).stdout
    quantised = megadapo("export", whole, tmp_path / "out", "--quantize=fp8", code=2)
    assert "only for a policy" in quantised.stderr
    row = json.loads(pairs.read_text().splitlines()[0])
    prompt = Prompt("id", (("user", row["prompt"][0]["content"]),), "", "arithmetic")
    function = RewardFunction(
        function="local_reward_model", options={"path": str(model)}, timeout_s=240.0
    )
    runner = start_runner(function)
    try:
        texts = [row["chosen"], row["rejected"]]
        chosen, rejected = runner.score_group(prompt, texts, [np.arange(1)] * 2)
    finally:
        runner.close()
    assert chosen.reward > rejected.reward
    assert AutoTokenizer.from_pretrained(model).eos_token_id == 0
    # a reward model continues from another one, and its first update finds trained weights
    two = f'--data.held_out={{one="{pairs}", other="{pairs}"}}'
    train(tmp_path / "next", pairs, f"--model.path={model}", two, num_steps=4)
    first, *_, last = metrics(tmp_path / "next")
    assert first["pairs/accuracy"] > 0.95
    assert last["held_out/one/pair_accuracy"] == last["eval/pair_accuracy"] > 0.95
