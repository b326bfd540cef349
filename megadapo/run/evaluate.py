"""Evaluation of a run's newest checkpoint, or of a model, on held-out problems."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console
from rich.logging import RichHandler

from megadapo.config import RunConfig
from megadapo.errors import ConfigError
from megadapo.observe.files import make_folder
from megadapo.observe.metrics.records import EvaluationRecord
from megadapo.observe.progress import Spinner, evaluation_line
from megadapo.observe.rollouts.files import HELD_OUT_FOLDER, step_file, write_rollouts
from megadapo.observe.tables import new_console
from megadapo.rollout.journal.journal import EVALUATION, journal_path
from megadapo.run.evaluations import Scored
from megadapo.run.launch import start_workers
from megadapo.run.rollouts import LiveRollouts
from megadapo.run.state.resume import checkpoint_store, find_checkpoint

SUFFIX = "-eval"
"""End of the name of the folder beside the run's that keeps answers."""


def evaluate_policy(config: RunConfig) -> EvaluationRecord:
    """Evaluate the run's newest checkpoint, or `model.path` without checkpoints.

    `run.resume` = "never" always evaluates `model.path`. The same trainer and engines start as for
    training, so a checkpoint needs no conversion.

    Raises:
        ConfigError: the configuration names no held-out problems.
    """
    if config.data.held_out is None:
        raise ConfigError("data.held_out is not set: name the problems to evaluate on")
    console = new_console()
    wants_base = config.run.resume == "never"
    store = checkpoint_store(config)
    checkpoint, messages = (None, []) if wants_base else find_checkpoint(config, store)
    if checkpoint is None:
        messages.append(f"evaluating {config.model.path}, not a checkpoint")
    else:
        # no prompt of data.train is sampled
        checkpoint = replace(checkpoint, accepts_other_data=True)
    folder = config.run.folder.with_name(f"{config.run.folder.name}{SUFFIX}")
    for message in messages + make_folder(folder):
        console.print(message, markup=False, soft_wrap=True)
    step = 0 if checkpoint is None else checkpoint.step
    # there are no rollouts to run beside
    alone = config.evaluation.model_copy(update={"placement": "alone"})
    config = config.model_copy(update={"evaluation": alone})
    with (
        _told(console),
        start_workers(config, Spinner(console), checkpoint, answers=folder) as workers,
    ):
        assert isinstance(workers.rollouts, LiveRollouts), "nothing is replayed"
        record, groups = _scored(workers.rollouts, step, console)
    if groups:
        write_rollouts(step_file(folder / HELD_OUT_FOLDER, step), groups)
        console.print(f"responses: megadapo show {folder} {step} --held-out", soft_wrap=True)
    journal_path(folder, EVALUATION, step).unlink(missing_ok=True)
    console.print(evaluation_line(record), markup=False, soft_wrap=True)
    return record


def _scored(rollouts: LiveRollouts, step: int, console: Console) -> Scored:
    """Return the result; a stop prints the one on the problems with answers."""
    rollouts.publish(policy_version=step)
    try:
        rollouts.evaluate(step)
    except KeyboardInterrupt:
        if (partial := rollouts.evaluations.so_far()) is not None:
            console.print("stopped; the same command continues. Until now:")
            console.print(evaluation_line(partial), markup=False, soft_wrap=True)
        raise
    [found] = rollouts.scored()
    return found


@contextmanager
def _told(console: Console) -> Iterator[None]:
    """Print what the package logs; SIGTERM stops like Ctrl-C."""
    handler = RichHandler(console=console, show_time=False, show_level=False, show_path=False)
    package = logging.getLogger("megadapo")
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        package.removeHandler(handler)
