"""Parts of the test suite that run together."""

import subprocess
import sys

import pytest

from tests.support import REPOSITORY

MAKEFILE = """\
good:
\t@echo "tests/a.py ...  [ 50%]"; echo "tests/b.py ...  [100%]"
bad:
\t@echo "tests/c.py F"; false
late:
\t@sleep 1; echo "late and good"
"""


@pytest.mark.parametrize(("targets", "code"), [(["good", "late"], 0), (["bad", "good", "late"], 1)])
def test_each_part_runs_and_one_failure_is_the_result(tmp_path, targets, code):
    """Catches a failure that a later success hides, and output that is lost."""
    (tmp_path / "Makefile").write_text(MAKEFILE)
    command = [sys.executable, REPOSITORY / "tools" / "run_tests.py", *targets]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == code
    assert "tests/b.py ...  [100%]" in ended.stdout and "late and good" in ended.stdout
    last = ended.stdout.splitlines()[-1]
    assert all(f"{target} 0.0 min" in last for target in targets)
