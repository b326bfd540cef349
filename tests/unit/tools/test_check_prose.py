"""The prose check finds its problems in docstrings and pages, and nothing in plain text."""

import subprocess
import sys

import pytest

from tests.support import REPOSITORY

LONG = "word " * 41
FENCE = "`" * 3


@pytest.mark.parametrize(
    ("name", "text", "problems"),
    [
        ("a.py", '"""Return the number of groups."""\nx = 1\n"""Number of tokens."""\n', []),
        ("a.py", '"""What it says of it."""\n', ["1: opening"]),
        ("a.py", 'x = 1\n"""Mean length."""\n', ["2: fragment"]),
        ("a.py", 'def f():\n    """Do.\n\n    Nobody asks anew.\n    """\n', ["4: word"] * 2),
        ("a.py", f'"""Return {LONG}."""\n', ["1: long sentence"]),
        ("a.py", '"""Return `whoever` or None if it is None."""\n', []),
        ("a.md", f"# Title\n\nA line.\nIt lies {LONG}\n\n| whoever |\n", ["4", "3", "6"]),
        ("a.md", f"{FENCE}\nwhoever goes on\n{FENCE}\nplain\n", []),
        ("a.md", f"- {LONG[:120]}\n- {LONG[:120]}\n", []),
    ],
)
def test_problems_have_a_line_and_a_name(tmp_path, name, text, problems):
    file = tmp_path / name
    file.write_text(text)
    command = [sys.executable, REPOSITORY / "tools" / "check_prose.py", file]
    done = subprocess.run(command, capture_output=True, text=True)
    found = [line.removeprefix(f"{file}:") for line in done.stdout.splitlines()]
    assert len(found) == len(problems), done.stdout + done.stderr
    assert all(one.startswith(start) for one, start in zip(found, problems, strict=True)), found
    assert done.returncode == (1 if problems else 0)
