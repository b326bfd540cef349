"""Fixtures that several files of whole-process tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs.whole_runs import run


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbed: what a resumed one must equal."""
    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    result = run(folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "before and after" in result.stdout
    return folder
