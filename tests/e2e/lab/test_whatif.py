"""`megadapo whatif` on a recorded run: the run's own numbers, with and without its checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megadapo.observe.rollouts.files import read_rollouts, rollouts_path, write_rollouts
from tests.support.runs.whole_runs import megadapo, metrics, run

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

SAME = "algorithm.objective.clip_high=0.28"
CHOICES = ("--set", SAME, "--set", "algorithm.objective.clip_low=0.01,algorithm.advantage=rloo")


def whatif(folder: Path) -> tuple[list[list[dict[str, Any]]], str]:
    """Return the objectives of each comparison of step 2, and the printed text."""
    file = folder.with_suffix(".json")
    done = megadapo("whatif", folder, "--step=2", *CHOICES, f"--json={file}")
    found = json.loads(file.read_text())["comparisons"]
    return [comparison["objectives"] for comparison in found], done.stdout


def test_own_objective_has_the_recorded_numbers(tmp_path):
    """Loss, gradient and log-probs of the one update to the bit; the update can be repeated."""
    folder = tmp_path / "run"
    whole = ("--algorithm.responses_per_mini_batch=64", "--observe.saved_groups=all")
    run(folder, *whole, "--checkpoint.every=1", "--evaluation.every=0", num_steps=2)
    recorded = metrics(folder)[1]
    (before, after), text = whatif(folder)
    assert "distance of their log-probs to the saved old ones: 0." in text
    for own, same, other in (before, after):
        assert own | {"name": same["name"]} == same and own["cosine"] == 1.0
        assert other["cosine"] < 0.9999 and other["num_tokens"] == own["num_tokens"]
    own = before[0]
    assert (own["loss"], own["grad_norm"], own["entropy"], own["num_tokens"]) == (
        *(recorded["policy/loss"], recorded["policy/grad_norm"]),
        *(recorded["policy/entropy"], recorded["tokens/trained"]),
    )
    assert before[2]["clip_low"] == 0.0 < after[2]["clip_low"]

    # the update from the checkpoint before, with its optimizer, gives the weights of the one after
    checkpoints = folder / "checkpoints"
    shutil.rmtree(checkpoints / "step-2")
    (again, repeated), text = whatif(folder)
    assert "from its updates, repeated here" in text
    assert (again, repeated) == (before, after)

    # without them, and with a part of the batch, the output says what it is about
    shutil.rmtree(checkpoints / "step-1")
    path = rollouts_path(folder, 2)
    groups = list(read_rollouts(path))
    first = next(i for i, group in enumerate(groups) if group.disposition == "trained")
    write_rollouts(path, groups[: first + 1])
    (earlier,), text = whatif(folder)
    assert earlier[0]["num_tokens"] < own["num_tokens"]
    assert "Only 1 of the step's 8 groups are saved" in text
    assert "in model.path, not those of step 1, which has none" in text
    assert "Clip shares of fresh tokens need the weights after step 2" in text
