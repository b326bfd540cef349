"""`megadapo profile --step` on the real trainer ranks of a recipe."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support import REPOSITORY


@pytest.mark.slow
@pytest.mark.full
def test_a_training_step_is_profiled_on_its_own_ranks(tmp_path):
    """Catches ranks that wait for the profiled one for ever, and a table without the head."""
    trace = tmp_path / "trace.json"
    command = [
        *(sys.executable, "-m", "megadapo.cli", "profile", "--step", "configs/quickstart.toml"),
        *("--steps=1", "--sequences=8", f"--trace={trace}", "--trainer.tensor_parallel=2"),
    ]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "tokens on 2 ranks" in result.stdout
    for row in (
        "gradients ",
        "optimizer ",
        "aten::mm",
        "_PolicyHead",
        "_RMSNorm",
        "roofline measured here",
    ):
        assert row in result.stdout, result.stdout
    assert json.loads(trace.read_text())["traceEvents"]
