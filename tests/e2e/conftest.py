"""Fixtures that several files of whole-process tests share."""

from pathlib import Path

import pytest

from tests.support.runs.whole_runs import run


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbed: what a resumed one must equal."""
    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    assert "before and after" in run(folder).stdout
    return folder
