"""Writers that send metrics to TensorBoard or wandb, besides `metrics.jsonl`.

Each program is optional and imported on demand. A resumed run starts a new run there.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from megadapo.errors import ConfigError
from megadapo.observe.config import WriterName

logger = logging.getLogger(__name__)

TENSORBOARD_FOLDER = "tensorboard"
PROJECT = "megadapo"
"""Default name of the project."""

CLOSE_S = 300.0
"""Seconds that a writer may take to send its last metrics."""

Record = Mapping[str, int | float | None]


def missing_packages(names: Sequence[WriterName]) -> list[str]:
    """Return the packages that these writers lack; each has its writer's name."""
    specs = [(name, importlib.util.find_spec(name)) for name in names]
    # a folder of that name in the current directory is found too, but without an origin
    return [name for name, spec in specs if spec is None or spec.origin is None]


def open_writer(
    name: WriterName, folder: Path, config: Mapping[str, Any], purge_step: int | None
) -> MetricWriter:
    """Open one writer.

    Args:
        folder: the run's folder, which also has the writers' local files.
        config: the run's configuration as JSON values.
        purge_step: first step that a resumed run repeats; None without a resume.
    """
    match name:
        case "tensorboard":
            return TensorboardWriter(folder, purge_step)
        case "wandb":
            return WandbWriter(folder, config)


def close_in_time(writer: MetricWriter) -> None:
    """Close a writer; abandon it after `CLOSE_S`."""
    # wandb waits without end for a network that is down
    closing = threading.Thread(target=writer.close, daemon=True)
    closing.start()
    closing.join(CLOSE_S)
    if closing.is_alive():
        name = type(writer).__name__
        logger.warning("%s did not send its last metrics in %g s: abandoned", name, CLOSE_S)


class TensorboardWriter:
    """Event files in `RUN/tensorboard`."""

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._lost = False
        try:
            self._writer = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=purge_step)
        except OSError as error:
            self._stop_writing("metrics", error)

    def write(self, record: Record, step: int) -> None:
        if self._lost:
            return
        try:
            for name, value in _measured(record).items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()
        except OSError as error:
            self._stop_writing(f"metrics from step {step} on", error)

    def _stop_writing(self, what: str, error: OSError) -> None:
        # only writes that cannot be repeated may end a run
        self._lost = True
        logger.warning("tensorboard has no %s: %s", what, error)

    def close(self) -> None:
        if not self._lost:
            self._writer.close()


class WandbWriter:
    """A run of Weights & Biases, with wandb's own login, project and mode."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                # wandb cannot take back steps, so a resumed run is a new run of the same group
                group=folder.absolute().name,
                name=folder.absolute().name,
                dir=folder,
                config=dict(config),
                settings=wandb.Settings(console="off", silent=True),
            )
            self._errors = (wandb.errors.Error, OSError)
        except wandb.errors.Error as error:
            raise ConfigError(
                f'observe.writers: "wandb" does not start: {error}; log in with `wandb login`, or '
                "set WANDB_MODE=offline"
            ) from error

        self._lost = False

    def write(self, record: Record, step: int) -> None:
        if self._lost:
            return
        try:
            self._run.log(_measured(record), step=step)
        except self._errors as error:
            # its process may be gone, which must not end a training run
            self._lost = True
            logger.warning("wandb refused metrics; none are sent from step %d on: %s", step, error)

    def close(self) -> None:
        try:
            self._run.finish()
        except self._errors as error:
            logger.warning("wandb did not take the end of the run: %s", error)


MetricWriter: TypeAlias = TensorboardWriter | WandbWriter
"""A destination of metrics: `write` sends one step's, `close` flushes them."""


def _measured(record: Record) -> dict[str, int | float]:
    return {name: value for name, value in record.items() if value is not None and name != "step"}
