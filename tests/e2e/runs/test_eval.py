"""`megadapo eval` as a user runs it: a stop loses no answers, and the answers can be read."""

import re
import signal
import subprocess
import sys
import time

import pytest

from megadapo.cli import main
from megadapo.rollout.journal.journal import EVALUATION, journal_path
from tests.support import REPOSITORY

PROBLEMS = 128


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_stopped_evaluation_tells_its_result_so_far_and_continues(tmp_path, capsys):
    command = [sys.executable, "-m", "megadapo.cli", "eval", "configs/quickstart.toml"]
    command += ["--resume=never", f"--run.folder={tmp_path / 'run'}", "--rollout.num_engines=1"]
    # a few slots make it last long enough to be stopped
    command += [f"--data.held_out=arithmetic:held_out:{PROBLEMS}", "--rollout.max_num_seqs=16"]
    journal = journal_path(tmp_path / "run-eval", EVALUATION, 0)
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        while not journal.exists() or journal.stat().st_size < 50_000:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate()
    assert process.returncode == 130
    assert "the same command continues" in output
    told = re.search(r"accuracy=0\.\d{4} .*problems=(\d+) samples=8", output)
    assert told is not None and 0 < int(told[1]) < PROBLEMS
    again = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    known = re.search(r"step 0: (\d+) problems have results", " ".join(again.stdout.split()))
    assert known is not None and int(known[1]) >= int(told[1])
    assert f"problems={PROBLEMS} samples=8" in again.stdout and not journal.exists()
    assert main(["show", str(tmp_path / "run-eval"), "0", "--held-out"]) == 0
    assert "held_out" in capsys.readouterr().out
