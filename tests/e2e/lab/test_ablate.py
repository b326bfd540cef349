"""A stopped ablation leaves no process, and the same command finishes it without repeating runs."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megadapo.errors import RunInterruptedError
from tests.support.runs.whole_runs import (
    SMALL,
    descendants,
    marked,
    metrics,
    start_command,
    wait_for_step,
)

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

ROWS = """
[overrides]
run.num_steps = 2
trainer.optimizer.warmup_steps = 2
[[row]]
name = "all groups"
overrides.sampling.selection = "all"
[[row]]
name = "with a signal"
overrides.sampling.selection = "signal"
expects = [{ measure = "no_signal_trained", change = "lower" }]
"""


def start(folder: Path) -> subprocess.Popen[str]:
    rows = folder / "rows.toml"
    rows.write_text(ROWS)
    words = ["ablate", "configs/quickstart.toml", "--rows", str(rows), "--seeds", "2"]
    words += ["--jobs", "2", "--folder", str(folder / "runs"), *SMALL]
    return start_command([sys.executable, "-m", "megadapo.cli", *words], marked(folder))


def test_stopped_ablation_continues_and_reports_all_runs(tmp_path):
    first = tmp_path / "runs" / "all-groups" / "seed-1"
    stopped = start(tmp_path)
    wait_for_step(stopped, first, 2)
    stopped.send_signal(signal.SIGTERM)
    output, _ = stopped.communicate(timeout=200)
    assert stopped.returncode == RunInterruptedError.exit_code, output
    assert descendants(tmp_path) == []
    assert not (tmp_path / "runs" / "ablation.json").exists()

    process = start(tmp_path)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert "Rows" in output and "with a signal" in output
    result = json.loads((tmp_path / "runs" / "ablation.json").read_text())
    assert [sorted(row["runs"]) for row in result["rows"]] == [["1", "2"], ["1", "2"]]
    assert result["rows"][1]["measures"]["no_signal_trained"]["mean"] == 0.0
    for row in ("all-groups", "with-a-signal"):
        for seed in (1, 2):
            folder = tmp_path / "runs" / row / f"seed-{seed}"
            assert [record["step"] for record in metrics(folder)] == [1, 2]
            assert json.loads((folder / "config.json").read_text())["run"]["seed"] == seed
    for name in ("ablation.md", "ablation.png", "report.html"):
        assert (tmp_path / "runs" / name).stat().st_size > 0

    again = start(tmp_path)
    output, _ = again.communicate(timeout=100)
    assert again.returncode == 0, output
    assert "starts" not in output and "resumes" not in output
