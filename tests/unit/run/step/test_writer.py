"""Records of steps on a disk that fails, and the last save of a run that ends early."""

import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megadapo.errors import InfraError, RunInterruptedError
from megadapo.observe.metrics.records import read_metrics
from megadapo.run.run import Run
from megadapo.run.step import record_writer
from megadapo.run.step.record_writer import StepWriter
from tests.support.rollout.saved_groups import saved_group
from tests.support.runs.checkpoints import write_shard
from tests.support.runs.runs_alone import config_of, record_step, saved_steps
from tests.support.runs.step_results import UPDATE


class FailingRollouts(SimpleNamespace):
    """Rollouts of which one call fails."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: {} if name == "state_dict" else []


def fail(error: Exception) -> Any:
    raise error


NOTHING: Any = None
BATCH: Any = SimpleNamespace(recorded=())


def workers_at(step: int) -> Any:
    """Workers without processes, whose trainer has updated `step`."""
    ranks = SimpleNamespace(checkpoint_bytes=1, all_alive=lambda: True)
    trainer = SimpleNamespace(step=step, begin_save=write_shard, ranks=ranks, state_dict=dict)
    return SimpleNamespace(trainer=trainer, rollouts=FailingRollouts(), tokenizer=None)


@pytest.fixture
def results(monkeypatch):
    """The results of a step, reduced to its number and one saved group."""
    monkeypatch.setattr(record_writer, "saved_groups", lambda step, *_: [saved_group(step=step)])
    monkeypatch.setattr(record_writer, "step_metrics", lambda step, *_, **__: {"step": step})
    monkeypatch.setattr(record_writer, "step_warnings", lambda *_: [])
    monkeypatch.setattr(record_writer, "check_oracles", lambda *_, **__: [])
    monkeypatch.setattr(record_writer, "RETRY_S", 0.01)


@pytest.mark.usefixtures("results")
@pytest.mark.parametrize("failing", ["rollouts", "metrics.jsonl"])
def test_step_waits_for_a_folder_that_fails(tmp_path, monkeypatch, failing):
    """A file server that is away for a minute would cost all steps since the last checkpoint."""
    config, entry = config_of(tmp_path, {"observe.writers": []}), tmp_path / failing
    with Run.open(config) as run:
        record_step(run, 1)
        aside = entry.rename(tmp_path / "aside-for-now") if entry.exists() else None
        entry.mkdir() if failing == "metrics.jsonl" else entry.touch()
        writer = StepWriter(config, run, workers_at(2))
        writer.save_rollouts(2, NOTHING, BATCH, np.zeros(0), UPDATE)
        waits = []

        def sleep(seconds: float) -> None:
            assert run.log.status.current.phase == "wait for the run's folder"
            waits.append(seconds)
            if len(waits) == 3:
                entry.rmdir() if entry.is_dir() else entry.unlink()
                if aside is not None:
                    aside.rename(entry)

        monkeypatch.setattr(record_writer.time, "sleep", sleep)
        writer.finish_step(2, NOTHING, UPDATE, None)
    assert len(waits) >= 3
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]
    assert (tmp_path / "rollouts" / "step-2.jsonl.zst").exists()
    assert (tmp_path / "log.txt").read_text().count("trying again for 10 minutes") == 1


@pytest.mark.usefixtures("results")
def test_folder_that_fails_for_long_or_a_stop_ends_the_wait(tmp_path, monkeypatch):
    config = config_of(tmp_path)
    (tmp_path / "rollouts").touch()
    with (
        pytest.raises(RunInterruptedError),
        Run.open(config) as run,
    ):
        writer = StepWriter(config, run, workers_at(1))
        writer.save_rollouts(1, NOTHING, BATCH, np.zeros(0), UPDATE)
        with monkeypatch.context() as patch:
            patch.setattr(record_writer, "FAILING_S", 0.0)
            with pytest.raises(InfraError, match="rollouts/step-1"):
                writer.finish_step(1, NOTHING, UPDATE, None)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        writer.finish_step(1, NOTHING, UPDATE, None)


@pytest.mark.parametrize(
    "error",
    [
        InfraError("rollout engine 3 is lost; no engine is left"),
        RunInterruptedError("stopped by SIGTERM"),
        ZeroDivisionError("unforeseen"),
    ],
    ids=["infra", "stopped", "unforeseen"],
)
@pytest.mark.parametrize("where", ["saving rollouts", "later"])
def test_any_error_saves_the_updated_step(tmp_path, monkeypatch, error, where):
    """Half an hour of a step was lost with an answer that somebody waited for."""
    monkeypatch.setattr(record_writer, "saved_groups", lambda *_: [])
    monkeypatch.setattr(record_writer, "step_metrics", lambda step, *_, **__: {"step": step})
    with pytest.raises(type(error)), Run.open(config_of(tmp_path)) as run:
        for step in (1, 2):
            record_step(run, step)
        writer = StepWriter(config_of(tmp_path), run, workers_at(3))
        with writer.saving_last_step():
            if where == "saving rollouts":
                run.log.save_rollouts = lambda *_: fail(error)
            writer.save_rollouts(3, NOTHING, BATCH, np.zeros(0), UPDATE)
            fail(error)
    assert saved_steps(tmp_path) == ["step-3"]
    assert [record["step"] for record in run.log.records] == [1, 2, 3]
