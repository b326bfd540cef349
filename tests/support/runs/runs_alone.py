"""Runs with nothing behind them: no process is started, and steps are done at once."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megadapo.config import RunConfig, from_dict
from megadapo.config.recipe import with_key
from megadapo.run.run import Run
from megadapo.run.state.checkpoint import WriteTrainer
from tests.support.runs.checkpoints import write_shard


def config_of(
    folder: str | Path = "somewhere", changes: Mapping[str, Any] | None = None, **run: Any
) -> RunConfig:
    """Return the configuration of a short run, with changes by dotted key and keys of [run]."""
    table: dict[str, Any] = {
        "run": {"folder": str(folder), "num_steps": 5, **run},
        "model": {"path": "somewhere"},
        "data": {"train": "arithmetic:train:64", "held_out": "arithmetic:held_out:8"},
        "evaluation": {"every": 2},
        "checkpoint": {"every": 2},
        "trainer": {"optimizer": {"warmup_steps": 2}},
    }
    for key, value in (changes or {}).items():
        table = with_key(table, tuple(key.split(".")), value)
    return from_dict(table)


def open_and_close(config: RunConfig) -> None:
    with Run.open(config):
        pass


def advance(
    run: Run, num_steps: int, write: Callable[[int], WriteTrainer] = lambda step: write_shard
) -> None:
    """Do steps as the loop does them; `write` gives the trainer's part of a step's checkpoint."""
    for step in run.steps():
        record_step(run, step)
        if run.checkpoints.is_due(step):
            run.save(write(step))
        if step == num_steps:
            return


def saved_steps(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


def record_step(run: Run, step: int) -> None:
    with run.phase("rollout"):
        pass
    run.log.record({"step": step, "tokens/generated": 10})
    run.complete(step, {"cursor": step})
