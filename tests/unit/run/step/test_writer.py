"""The last save of a run that ends early."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megadapo.errors import InfraError, RunInterruptedError
from megadapo.run.run import Run
from megadapo.run.step import writer as writer_module
from megadapo.run.step.writer import StepWriter
from tests.support.runs.checkpoints import write_shard
from tests.support.runs.runs_alone import config_of, record_step, saved_steps
from tests.support.runs.step_results import UPDATE


class FailingRollouts(SimpleNamespace):
    """Rollouts of which one call fails."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: {} if name == "state_dict" else []


def fail(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize(
    "error",
    [
        InfraError("rollout engine 3 is lost; no engine is left"),
        RunInterruptedError("stopped by SIGTERM"),
        ZeroDivisionError("unforeseen"),
    ],
    ids=["infra", "stopped", "unforeseen"],
)
@pytest.mark.parametrize("where", ["saving rollouts", "waiting for engines", "publishing"])
def test_any_error_saves_the_updated_step(tmp_path, monkeypatch, error, where):
    """Half an hour of a step was lost with an answer that somebody waited for."""
    monkeypatch.setattr(writer_module, "saved_groups", lambda *_: [])
    monkeypatch.setattr(writer_module, "step_metrics", lambda step, *_, **__: {"step": step})
    ended = []

    def begin_save(folder: Any, *, last: bool) -> Any:
        ended.append(last)
        return write_shard(folder)

    rollouts = FailingRollouts()
    trainer = SimpleNamespace(
        step=3, begin_save=begin_save, ranks=SimpleNamespace(checkpoint_bytes=1), state_dict=dict
    )
    trainer.ranks.all_alive = lambda: True
    workers: Any = SimpleNamespace(trainer=trainer, rollouts=rollouts, tokenizer=None)
    with pytest.raises(type(error)), Run.open(config_of(tmp_path)) as run:
        for step in (1, 2):
            record_step(run, step)
        writer = StepWriter(config_of(tmp_path), run, workers)
        with writer.saving_last_step():
            if where == "saving rollouts":
                run.log.save_rollouts = lambda *_: fail(error)
            if where == "waiting for engines":
                rollouts.wait = lambda: fail(error)
            batch: Any = SimpleNamespace(recorded=())
            nothing: Any = None
            writer.update_done(3, nothing, batch, np.zeros(0), UPDATE)
            fail(error)
    assert saved_steps(tmp_path) == ["step-3"] and ended == [True]
    assert [record["step"] for record in run.log.records] == [1, 2, 3]
