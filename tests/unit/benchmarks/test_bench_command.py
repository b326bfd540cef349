"""`megadapo bench` starts the scripts of the checkout."""

import subprocess
import sys

import pytest

from megadapo.cli import run_command
from megadapo.commands.lab import bench
from megadapo.errors import ConfigError
from tests.support import REPOSITORY


def test_every_script_is_listed(capsys):
    scripts = {path.stem for path in (REPOSITORY / "benchmarks").glob("*.py")}
    assert scripts - {"shared"} == set(bench.SCRIPTS)
    with pytest.raises(SystemExit):
        run_command(["bench", "--help"])
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in bench.SCRIPTS)


def test_script_gets_all_further_arguments_and_gives_its_exit_code(tmp_path):
    """In another folder and without PYTHONPATH the script imports the megadapo that started it."""
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from megadapo.cli import main; main()"
    command = [sys.executable, "-E", "-c", code, str(REPOSITORY), "bench"]
    command += ["published_times", "--fit", "--shape=8"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "published_times.py: error: unrecognized arguments: --shape=8\n" in done.stderr


def test_installation_without_the_scripts_says_where_they_are(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "FOLDER", tmp_path)
    with pytest.raises(ConfigError, match=r"repository(.|\n)*python benchmarks/head.py"):
        run_command(["bench", "head", "--help"])
