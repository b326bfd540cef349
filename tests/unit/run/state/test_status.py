"""status.json matches the run, and never ends it."""

import json
import os
import time

import pytest

from megadapo.cli import main
from megadapo.errors import DataError, OracleError, RunInterruptedError
from megadapo.run.state.lease import Lease
from megadapo.run.state.status import STATUS_FILE, StatusFile, read_status


def resumed_at(folder, step):
    status = StatusFile(folder, num_steps=9)
    status.update(step=step, checkpoint_step=step, resumed_from=step)
    return status


def test_progress_of_a_long_phase_is_written_rarely(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("megadapo.run.state.status.time.monotonic", lambda: now[0])
    status = StatusFile(tmp_path, num_steps=9)
    status.update(phase="rollout")
    for _ in range(12):
        now[0] += 1.0
        status.report_progress(0, int(now[0]))
    read = read_status(tmp_path)
    assert (read.micro_batches, read.tokens) == (0, 111)
    before = (tmp_path / STATUS_FILE).stat().st_mtime_ns
    now[0] += 100.0
    status.report_progress(0, 112)
    assert read_status(tmp_path).tokens == 112
    after = (tmp_path / STATUS_FILE).stat().st_mtime_ns
    assert after > before
    now[0] += 100.0
    status.report_progress(0, 112)
    assert (tmp_path / STATUS_FILE).stat().st_mtime_ns == after


@pytest.mark.parametrize(
    ("step", "error", "state", "reason"),
    [
        (9, None, "finished", None),
        (8, None, "stopped", None),
        (8, RunInterruptedError("stopped by SIGTERM"), "stopped", "stopped by SIGTERM"),
        (8, OracleError("ratio\nis off"), "failed", "OracleError: ratio is off"),
        (8, KeyboardInterrupt(), "failed", "KeyboardInterrupt"),
    ],
)
def test_last_line_has_reason_and_resume_command(tmp_path, step, error, state, reason):
    status = resumed_at(tmp_path, 0)
    status.update(checkpoint_step=6)
    status.update(step=step)
    line = status.end(error)
    assert line.startswith(f"end: state={state} step={step}/9 checkpoint=6")
    assert (f"megadapo train {tmp_path}" in line) == (state != "finished")
    assert "\n" not in line
    read = read_status(tmp_path)
    assert read.state == state
    assert reason is None or (reason in line and reason in read.reason)


def test_unwritable_status_is_a_warning(tmp_path, caplog):
    folder = tmp_path / "gone"
    folder.mkdir()
    status = resumed_at(folder, 0)
    (folder / STATUS_FILE).unlink()
    folder.rmdir()
    status.update(phase="train")
    assert "was not written" in caplog.text


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"state": "running", "other": 1}'])
def test_invalid_status_is_refused(tmp_path, text):
    (tmp_path / STATUS_FILE).write_text(text)
    with pytest.raises(DataError, match=STATUS_FILE):
        read_status(tmp_path)
    resumed_at(tmp_path, 0)
    assert read_status(tmp_path).restarts == 0


def test_driver_without_progress_is_stalled(tmp_path, capsys):
    """The exit code was 0 as long as the driver was alive."""
    lease = Lease.take(tmp_path)
    resumed_at(tmp_path, 2).update(phase="export")
    for age_s, code, state in ((7000, 0, "running"), (7300, 1, "stalled")):
        then = time.time() - age_s
        os.utime(tmp_path / STATUS_FILE, (then, then))
        assert main(["status", str(tmp_path), "--json"]) == code
        status = json.loads(capsys.readouterr().out)
        assert status["state"] == state
    assert status["reason"].startswith("no progress for 2:01:4")
    lease.close()


def test_limit_of_a_stall_follows_the_longest_pause(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("megadapo.run.state.status.time.monotonic", lambda: now[0])
    status = StatusFile(tmp_path, num_steps=9)
    now[0] += 700.0
    status.update(phase="rollout")
    now[0] += 5.0
    status.report_progress(0, 1)
    assert read_status(tmp_path).stall_limit_s() == 14000.0
    now[0] += 60.0
    StatusFile(tmp_path, num_steps=9)
    assert read_status(tmp_path).longest_pause_s == 700.0


def test_command_tells_living_from_dead_driver(tmp_path, capsys):
    assert main(["status", str(tmp_path)]) == DataError.exit_code
    assert "not a run's folder" in capsys.readouterr().err
    lease = Lease.take(tmp_path)
    status = resumed_at(tmp_path, 2)
    status.update(phase="rollout")
    assert main(["status", str(tmp_path)]) == 0
    assert "rollout" in capsys.readouterr().out
    lease.close()
    assert main(["status", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["state"] == "gone"
