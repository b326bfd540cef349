"""Repeating the schedule of a run whose batches depend on the engines' speed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from megadapo.config import RunConfig
from megadapo.errors import ConfigError
from megadapo.rollout.sampling.schedule import SCHEDULE_FILE, SamplingSchedule, read_source
from megadapo.run.state.config_diff import samples_digest

RULES = ("mode", "prompts_per_step", "max_staleness", "max_asked_per_prompt")
"""Keys of `[sampling]` that a schedule depends on beside those of a group's content."""


def check_schedule(config: RunConfig, run: Path) -> str:
    """Check that the schedule of a run can be repeated; return a note for the user.

    Raises:
        ConfigError: the run has none, a damaged one or one of other rules, or the mode needs none,
            or another run would be overwritten.
    """
    path = run / SCHEDULE_FILE
    if not config.sampling.carries:
        raise ConfigError(
            f'--schedule: with sampling.mode = "{config.sampling.mode}" a run repeats itself '
            "without one; leave it out"
        )
    if not path.is_file():
        raise ConfigError(
            f"--schedule {run}: there is no {SCHEDULE_FILE}; only runs with sampling.mode = "
            '"partial" or "async" write one (training by a file of megadapo simulate is gone)'
        )
    if run.resolve() == config.run.folder.resolve():
        raise ConfigError(
            f"--schedule {run}: is the run itself, which repeats its own schedule when it resumes; "
            "choose another run.folder"
        )
    read_source(path, _rules(config))
    if repeats_exactly(config):
        return f"repeating the schedule of {run}; the run stops at the first difference"
    return (
        f"repeating the schedule of {run}: its decisions only, and differences are counted in "
        "the log, because on CUDA equal tokens need rollout.batch_invariant = true "
        "and equal weights trainer.deterministic = true"
    )


def repeats_exactly(config: RunConfig) -> bool:
    """Return whether engines and trainer compute the same bits twice."""
    return config.is_deterministic and (
        config.rollout.batch_invariant or not config.cluster.uses_cuda
    )


def open_schedule(
    config: RunConfig, folder: Path | None, repeated: Path | None
) -> SamplingSchedule:
    """Open the schedule of the run in `folder`, or one in memory.

    `repeated`: folder of the run to repeat, if any.

    Raises:
        ConfigError: its schedule cannot be read, is damaged, or has other rules, or the run in
            `folder` followed a simulated one.
        InfraError: the run's own schedule cannot be read.
    """
    if folder is not None and (folder / "simulated.json").exists():
        raise ConfigError(
            f"{folder}: this run trains by a file of megadapo simulate, which is gone; choose "
            "another run.folder"
        )
    if not config.sampling.carries:
        return SamplingSchedule()
    return SamplingSchedule(
        None if folder is None else folder / SCHEDULE_FILE,
        _rules(config),
        source=None if repeated is None else repeated / SCHEDULE_FILE,
        is_strict=repeats_exactly(config),
    )


def _rules(config: RunConfig) -> str:
    """Return a digest of how groups are requested, generated, scored and selected."""
    keys = [getattr(config.sampling, name) for name in RULES]
    return hashlib.sha256(json.dumps([samples_digest(config), keys]).encode()).hexdigest()
