"""The sections of what `megadapo/run` does: `[run]` and `[checkpoint]`.

They lie here because a run imports its configuration, so the configuration cannot import the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from megadapo.section import Section


class RunSection(Section, title="run"):
    """Which run this is: where it is kept, how long it is, and where it starts."""

    folder: Annotated[Path, Field(strict=False)]
    """Run folder for metrics, logs and checkpoints, relative to the current directory."""
    num_steps: PositiveInt
    """Number of rollout steps of the whole run, those before a resume included."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of everything random: prompt order, sampling and a random initialisation."""
    resume: str = "auto"
    """Checkpoint to start from: the newest complete one ("auto"), none ("never"), or a path. A path
    is taken once: as soon as the run has a later checkpoint, it means the newest."""
    grace_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that a scheduler leaves between SIGTERM and SIGKILL. An update or an evaluation that
    would not end in time for a save is given up; as half an update cannot be saved, every step is
    saved where updates take so long. 0: what is under way is always finished."""

    def conflicts(self) -> Iterator[str]:
        if self.folder == Path():
            yield "run.folder: expected a folder of the run's own, found the current directory"
        if not self.resume:
            yield 'run.resume must be "auto", "never" or the path of a checkpoint'


class CheckpointConfig(Section, title="checkpoint"):
    """When checkpoints are written and how many are kept."""

    every: PositiveInt = 10
    """Steps between checkpoints; the last step is always saved, and so is the last completed one
    where a run ends early with its trainer unharmed."""
    every_minutes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Minutes after which a completed step is saved whatever its number; 0: only `every` counts."""
    keep: Annotated[int, Field(ge=2)] = 2
    """Complete checkpoints to keep; older ones go only after a newer one is committed. At least 2,
    as the newest may be damaged."""
    keep_every: NonNegativeInt = 0
    """Steps between checkpoints that are never deleted. 0: none are kept for good."""
    export_every: NonNegativeInt = 0
    """Steps between checkpoints that are also written as Hugging Face folders, to exports/step-N of
    the run's folder, while training goes on; the last step is one of them. 0: none are."""

    def conflicts(self) -> Iterator[str]:
        if self.keep_every % self.every:
            yield (
                f"checkpoint.keep_every = {self.keep_every} must be 0 or a multiple of "
                f"checkpoint.every = {self.every}"
            )
        if self.export_every % self.every:
            yield (
                f"checkpoint.export_every = {self.export_every} must be 0 or a multiple of "
                f"checkpoint.every = {self.every}"
            )
