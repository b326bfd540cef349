"""The script for the first GPU, as far as a machine without one can go."""

from __future__ import annotations

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


def test_results_of_an_earlier_run_are_not_written_over(tmp_path: Path) -> None:
    """Catches an hour of a rented machine lost to a second start."""
    result = run("--rehearse", str(tmp_path))
    assert result.returncode == 2 and "name another folder" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_every_part_that_needs_no_gpu_passes(tmp_path: Path) -> None:
    """Catches a command of the script that is not there any more, before a GPU is paid for."""
    result = run("--rehearse", str(tmp_path / "results"))
    report = (tmp_path / "results" / "report.md").read_text()
    assert result.returncode == 0, report
    assert report.count("| passed |") == 11
    assert "'oracle/" in report or "ratio" in report
