"""A stop file stops a run as a signal does, and only the right driver."""

import errno
import os
import threading
import time
from unittest.mock import Mock

import pytest

from megadapo.config import RunConfig
from megadapo.errors import InfraError, RunInterruptedError
from megadapo.run.run import Run
from megadapo.run.state.checkpoint import WriteTrainer
from megadapo.run.state.status import read_status
from megadapo.run.state.stop import take_stop_file
from tests.support.runs.checkpoints import write_shard
from tests.support.runs.runs_alone import config_of, record_step, saved_steps


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("megadapo.run.state.stop.LOOK_S", 0.05)


def wait_in_a_rollout(config: RunConfig, begin, write: WriteTrainer = write_shard) -> None:
    """Complete one step, and save it as the loop does when the rollout of the next is stopped."""
    with Run.open(config) as run:
        try:
            for step in run.steps():
                if step == 2:
                    begin()
                with run.phase("rollout", interruptible=True):
                    time.sleep(0 if step == 1 else 20)
                record_step(run, step)
        except RunInterruptedError:
            run.save(write, wait=True)
            raise


@pytest.mark.parametrize(
    ("text", "stays_stopped", "reason"),
    [("", True, "/stop"), ("restart node-3 ends\n", False, "/stop: restart node-3 ends")],
)
def test_stop_file_saves_and_stops_and_is_used_once(tmp_path, text, stays_stopped, reason):
    path = tmp_path / "stop"
    path.write_text("of another driver, which has ended")
    os.utime(path, (0, 0))
    start = time.monotonic()
    with pytest.raises(RunInterruptedError, match=f"stopped by the file .*{reason}$"):
        wait_in_a_rollout(config_of(tmp_path), lambda: path.write_text(text))
    assert time.monotonic() - start < 10
    assert saved_steps(tmp_path) == ["step-1"] and not path.exists()
    status = read_status(tmp_path)
    assert (status.state, status.stays_stopped) == ("stopped", stays_stopped)


def test_stopped_run_stays_stopped_if_its_save_fails(tmp_path):
    """A supervisor took the failed save for the reason of the end, and started the run again."""
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(InfraError, match="No space left"):
        wait_in_a_rollout(config_of(tmp_path), (tmp_path / "stop").touch, full)
    status = read_status(tmp_path)
    assert (status.state, status.stays_stopped) == ("failed", True)


def test_stop_file_of_a_start_is_followed(tmp_path):
    """It was taken for one of an earlier driver, because the run's folder was not open yet."""
    (tmp_path / "stop").touch()
    with pytest.raises(RunInterruptedError, match="stopped by the file"):
        wait_in_a_rollout(config_of(tmp_path), lambda: None)


def test_stop_file_is_read_after_its_text_is_written(tmp_path):
    """`echo restart > stop` makes an empty file first."""
    path = tmp_path / "stop"
    path.touch()
    threading.Timer(0.05, lambda: path.write_text("restart")).start()
    assert take_stop_file(tmp_path) == "restart"
    assert take_stop_file(tmp_path) is None
