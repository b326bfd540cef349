"""The parts of the script for the first GPU that run without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import REPOSITORY

SCRIPT = REPOSITORY / "tools" / "first_gpu.sh"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [SCRIPT, *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"PATH": path},
    )


def test_earlier_results_are_not_overwritten(tmp_path):
    result = run("--rehearse", str(tmp_path))
    assert result.returncode == 2 and "name another folder" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_parts_without_a_gpu_pass(tmp_path):
    result = run("--rehearse", str(tmp_path / "results"))
    report = (tmp_path / "results" / "report.md").read_text()
    assert result.returncode == 0, report
    assert report.count("| passed |") == 11
    assert "'oracle/" in report or "ratio" in report
