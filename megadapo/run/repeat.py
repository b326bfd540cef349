"""The schedule of a run whose batches depend on the engines' speed: repeated, or simulated."""

from __future__ import annotations

import filecmp
import hashlib
import json
import shutil
from pathlib import Path

from megadapo.config import RunConfig
from megadapo.errors import ConfigError
from megadapo.rollout.sampling.schedule import SCHEDULE_FILE, Schedule, read_source
from megadapo.rollout.simulated import SIMULATED_FILE, SimulatedSchedule
from megadapo.run.state.config_diff import samples_digest

RULES = ("mode", "prompts_per_step", "max_staleness", "max_asked_per_prompt")
"""Keys of `[sampling]` that a schedule depends on beside those of a group's content."""


def check_schedule(config: RunConfig, run: Path) -> str:
    """Check that a run can use the schedule that is given; return a note for the user.

    `run`: folder of the run to repeat, or a simulated schedule: its file, or a run with one.

    Raises:
        ConfigError: it has none, a damaged one or one of other rules, or the mode needs none, or
            another run would be overwritten, or the simulated one does not suit the configuration.
    """
    if (simulated := _simulated_file(run)) is not None:
        return check_simulated(config, SimulatedSchedule.read(simulated))
    path = run / SCHEDULE_FILE
    if not config.sampling.carries:
        raise ConfigError(
            f'--schedule: with sampling.mode = "{config.sampling.mode}" a run repeats itself '
            "without one; leave it out"
        )
    if not path.is_file():
        raise ConfigError(
            f"--schedule {run}: there is no {SCHEDULE_FILE}; only runs with sampling.mode = "
            '"partial" or "async" write one (nor is it a file of megadapo simulate --schedule)'
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


def check_simulated(config: RunConfig, schedule: SimulatedSchedule) -> str:
    """Check that a simulated schedule suits a run; return a note for the user.

    Raises:
        ConfigError: it does not; the error names the keys.
    """
    sampling = config.sampling
    problems = []
    if sampling.mode != "partial":
        problems.append(
            f'sampling.mode = "{sampling.mode}": must be "partial", because the run generates and '
            "trains in turn"
        )
    if sampling.max_staleness != schedule.max_staleness:
        problems.append(
            f"sampling.max_staleness = {sampling.max_staleness}: must be {schedule.max_staleness}"
        )
    for key, value, largest in (
        ("sampling.prompts_per_step", sampling.prompts_per_step, schedule.prompts_per_step),
        (
            "sampling.responses_per_prompt",
            sampling.responses_per_prompt,
            schedule.responses_per_prompt,
        ),
        ("run.num_steps", config.run.num_steps, schedule.num_steps),
    ):
        if value > largest:
            problems.append(f"{key} = {value}: must be at most {largest}")
    if config.rollout.environments:
        problems.append("rollout.environments: a response with answers cannot be cut anywhere")
    if problems:
        raise ConfigError(
            "\n".join([f"--schedule: the schedule is of {schedule.title}", *problems])
        )
    return f"tokens have the ages of a simulation of {schedule.title}"


def open_simulated(
    config: RunConfig, folder: Path | None, given: Path | None
) -> SimulatedSchedule | None:
    """Return the simulated schedule of a run, and keep it in the run's folder.

    Args:
        given: path of `--schedule`; a run that resumes has the file already.

    Raises:
        ConfigError: the file has no schedule, or it does not suit the run.
    """
    kept = None if folder is None else folder / SIMULATED_FILE
    file = _simulated_file(given)
    if kept is not None and kept.exists():
        if given is not None and (file is None or not filecmp.cmp(file, kept, shallow=False)):
            raise ConfigError(f"--schedule {given}: the run began with another one, {kept}")
        file = kept
    if file is None:
        return None
    schedule = SimulatedSchedule.read(file)
    check_simulated(config, schedule)
    if kept is not None and file != kept:
        # as a whole: a killed run must not resume with a part of it
        unfinished = kept.with_suffix(".part")
        shutil.copyfile(file, unfinished)
        unfinished.replace(kept)
    return schedule


def _simulated_file(given: Path | None) -> Path | None:
    """Return the file of the simulated schedule that the user gives, itself or by its run."""
    if given is None or given.is_file():
        return given
    kept = given / SIMULATED_FILE
    return kept if kept.is_file() else None


def repeats_exactly(config: RunConfig) -> bool:
    """Return whether engines and trainer compute the same bits twice."""
    return config.is_deterministic and (
        config.rollout.batch_invariant or not config.cluster.uses_cuda
    )


def open_schedule(config: RunConfig, folder: Path | None, repeated: Path | None) -> Schedule:
    """Open the schedule of the run in `folder`, or one in memory.

    `repeated`: folder of the run to repeat, if any.

    Raises:
        ConfigError: its schedule cannot be read, is damaged, or has other rules.
        InfraError: the run's own schedule cannot be read.
    """
    if not config.sampling.carries:
        return Schedule()
    return Schedule(
        None if folder is None else folder / SCHEDULE_FILE,
        _rules(config),
        source=None if repeated is None else repeated / SCHEDULE_FILE,
        is_strict=repeats_exactly(config),
    )


def _rules(config: RunConfig) -> str:
    """Return a digest of how groups are requested, generated, scored and selected."""
    keys = [getattr(config.sampling, name) for name in RULES]
    return hashlib.sha256(json.dumps([samples_digest(config), keys]).encode()).hexdigest()
