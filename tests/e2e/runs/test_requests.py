"""A running run answers requests for a checkpoint, an evaluation, its stacks and a stop."""

import os
import signal

import pytest

from megadapo.cluster.process_log import driver_log
from megadapo.errors import RunInterruptedError
from megadapo.observe.metrics.records import read_evaluations
from megadapo.run.state.status import read_status
from tests.support.runs.whole_runs import descendants, start, wait_for_step, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(600)]


def state(folder):
    path = folder / "status.json"
    return read_status(folder).state if path.exists() else None


@pytest.mark.fault
def test_supervised_run_answers_requests(tmp_path):
    """Kills while it starts are no restarts; a stop file may be for a pause or for good."""
    folder = tmp_path / "run"
    rare = ("--evaluation.every=0", "--checkpoint.every=100")
    process = start(folder, "--restarts=1", "--run.num_steps=200", *rare)
    for _ in range(2):
        wait_until(lambda: state(folder) == "running", process)
        os.kill(read_status(folder).pid, signal.SIGKILL)
        wait_until(lambda: state(folder) == "waiting", process)
        assert read_status(folder).reason == "SIGKILL"
    wait_for_step(process, folder, 1)
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: list((folder / "checkpoints").glob("step-*")), process)
    process.send_signal(signal.SIGUSR2)
    wait_until(lambda: read_evaluations(folder), process)
    os.kill(read_status(folder).pid, signal.SIGQUIT)
    wait_until(lambda: "most recent call first" in driver_log(folder).read_text(), process)

    (folder / "stop").write_text("restart: a node ends")
    wait_until(lambda: state(folder) == "waiting", process)
    saved = read_status(folder).checkpoint_step
    assert saved == read_status(folder).step > 0
    wait_for_step(process, folder, saved + 1)
    (folder / "stop").touch()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == RunInterruptedError.exit_code, output
    status = read_status(folder)
    assert (status.state, status.checkpoint_step) == ("stopped", status.step)
    assert "restart 1 of 1" in output and "not restarting: it was asked to stop" in output
    assert descendants(folder) == []
