"""The `[run]` and `[checkpoint]` sections.

They are here because `megadapo/run` imports the configuration and cannot be imported by it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, PositiveInt

from megadapo.section import Section


def _expand_user(path: Path) -> Path:
    """Return a path with a home folder in place of `~`, as data.train is read."""
    return Path(os.path.expanduser(path))


class RunSection(Section, title="run"):
    """The run's folder, length, seed and starting point."""

    folder: Annotated[Path, Field(strict=False), AfterValidator(_expand_user)]
    """Run folder for metrics, logs and checkpoints, relative to the current directory."""
    num_steps: PositiveInt
    """Number of rollout steps of the whole run, including those before a resume."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of prompt order, sampling and random initialisation."""
    resume: str = "auto"
    """Checkpoint to start from: the newest complete one ("auto"), none ("never"), or a path. A path
    is used once: when the run has a later checkpoint, a restart uses the newest."""
    grace_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that the scheduler leaves between SIGTERM and SIGKILL. An update or an evaluation
    that would not end in time is cancelled. If updates take longer than this, every step is saved,
    because half an update cannot be. 0: always finish the current phase."""

    on_event: str | None = None
    """Command that gets the run's events, a JSON object on standard input for each: start, step,
    save, restart, oracle and end. Its words are split as by a shell, but no shell runs. It is
    killed after 10 s, and its failures are one warning."""

    def conflicts(self) -> Iterator[str]:
        try:
            if self.on_event is not None and not shlex.split(self.on_event):
                yield 'run.on_event is empty; "none" stands for no command'
        except ValueError as error:
            yield f"run.on_event = {self.on_event!r} is no command: {error}"
        if self.folder == Path():
            yield "run.folder: expected a folder of the run's own, found the current directory"
        if not self.resume:
            yield 'run.resume must be "auto", "never" or the path of a checkpoint'


class SupervisedConfig(Section, title="supervised"):
    """Training on rows of data.train instead of rollouts, as `megadapo sft` and
    `megadapo reward-model` do it."""

    rows_per_update: PositiveInt = 64
    """Rows of one optimizer update, which is one step."""
    epochs: PositiveInt | None = None
    """Passes over the rows, which set the number of steps; none: run.num_steps sets it."""


class CheckpointConfig(Section, title="checkpoint"):
    """Intervals between checkpoints, and the number of checkpoints to keep."""

    every: PositiveInt = 10
    """Steps between checkpoints. The last completed step of a run is always saved, also if it ends
    early, unless the trainer has failed."""
    keep: Annotated[int, Field(ge=2)] = 2
    """Complete checkpoints to keep. An older one is deleted after a newer one is committed. At
    least 2, because the newest may be damaged."""
