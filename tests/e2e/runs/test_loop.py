"""The loops of examples/loop learn what `megadapo train` learns."""

import subprocess
import sys

import pytest

from tests.support import REPOSITORY
from tests.support.runs.whole_runs import NUM_STEPS, SMALL, metrics

LOOPS = REPOSITORY / "examples" / "loop"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run_loop(name, folder, *overrides):
    """Return the numbers that a loop prints, as texts by name, for each step."""
    steps = f"--run.num_steps={NUM_STEPS}", f"--trainer.optimizer.warmup_steps={NUM_STEPS}"
    done = subprocess.run(
        [sys.executable, LOOPS / name, f"--run.folder={folder}", *steps, *SMALL, *overrides],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("step=")]
    return [dict(word.split("=") for word in line.split()) for line in lines]


def test_loop_has_the_numbers_of_a_run(uninterrupted, tmp_path):
    """Otherwise the page would teach another algorithm than the one that users train with."""
    printed = run_loop("loop.py", tmp_path)
    expected = [f"{one['policy/loss']:.3e}" for one in metrics(uninterrupted)]
    assert [one["loss"] for one in printed] == expected


def test_asynchronous_loop_trains(tmp_path):
    """With one slot publications stop responses, which are continued with the new weights."""
    printed = run_loop(
        "async_loop.py", tmp_path, "--evaluation.every=0", "--rollout.max_num_seqs=1"
    )
    assert [one["step"] for one in printed] == ["1", "2", "3", "4"]
    assert {one["first_ratio_error"] for one in printed} == {"0.0"}
    assert any(float(one["stale_tokens"]) > 0 for one in printed)
