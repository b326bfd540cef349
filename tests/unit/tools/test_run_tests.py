"""Parts of the test suite that run together."""

import time

import pytest

from tests.support.tools import load_tool

MAKEFILE = """\
good:
\t@echo "tests/a.py ...  [ 50%]"; echo "tests/b.py ...  [100%]"
bad:
\t@echo "tests/c.py F"; false
late:
\t@sleep 0.2; echo "late and good"
"""


@pytest.mark.parametrize(("targets", "code"), [(["good", "late"], 0), (["bad", "good", "late"], 1)])
def test_each_part_runs_and_one_failure_is_the_result(tmp_path, monkeypatch, capfd, targets, code):
    """Catches a failure that a later success hides, and output that is lost."""
    (tmp_path / "Makefile").write_text(MAKEFILE)
    monkeypatch.chdir(tmp_path)
    tool, sleep = load_tool("run_tests"), time.sleep
    monkeypatch.setattr("time.sleep", lambda seconds: sleep(seconds / 20))
    assert tool.main(targets) == code
    shown = capfd.readouterr().out
    assert "tests/b.py ...  [100%]" in shown and "late and good" in shown
    assert all(f"{target} 0.0 min" in shown.splitlines()[-1] for target in targets)
