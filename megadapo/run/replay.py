"""Replay: train on saved rollouts, without engines.

Groups trained on in step N are read from `step-N.jsonl.zst` and trained on again in step N, in the
same order. parity/* compares the trainer's log-probs with the saved log-probs of the engine, for
tokens with the replay's policy version. It is exact while the replay repeats the saved run, and
measures the distance from it afterwards.

A run whose batches depend on the engines' speed repeats the schedule of another run instead, with
engines of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from megadapo.config import RunConfig
from megadapo.data.batch import in_training_order
from megadapo.data.group import MIN_RESPONSES, Group
from megadapo.errors import ConfigError, DataError
from megadapo.models.description import describe_model
from megadapo.models.folder import read_hf_config, resolve_model_folder
from megadapo.observe.rollouts.files import ROLLOUTS_FOLDER, read_rollouts, step_file, steps_in
from megadapo.observe.rollouts.saved_group import SavedGroup
from megadapo.observe.run_records import RunRecords
from megadapo.rollout.sampling.schedule import SCHEDULE_FILE, SamplingSchedule, read_source
from megadapo.rollout.sampling.statistics import SampledBatch
from megadapo.run.rollouts import Rollouts
from megadapo.run.state.resume import samples_digest

REJECTED = ("all_correct", "all_wrong", "out_of_band", "equal")
"""Dispositions of groups that are not mixed."""


def check_replay(config: RunConfig, folder: Path) -> str:
    """Return a note for the user; raise ConfigError if a run cannot replay these rollouts."""
    if (config.run.folder / ROLLOUTS_FOLDER).resolve() == folder.resolve():
        raise ConfigError(
            f"run.folder = {config.run.folder} is the run that saved {folder}: choose another "
            "run.folder for the replay"
        )
    _check_steps(folder, config.run.num_steps, config.run.num_steps)
    _check_whole(config, folder)
    return (
        f"replaying {folder}: parity/* compares with the saved log-probs, which differ from the "
        "trainer's if the configuration differs from the saved run's"
    )


class ReplayedRollouts(Rollouts):
    """Batches of saved groups; publishing only counts the policy version."""

    def __init__(self, config: RunConfig, folder: Path, *, first_step: int) -> None:
        """Check that every step from `first_step` to the last of the run is saved."""
        _check_steps(folder, first_step, config.run.num_steps)
        model = resolve_model_folder(config.model.path, with_weights=False)
        self._vocab_size = describe_model(read_hf_config(model)).shape.vocab_size
        self._config = config
        self._folder = folder
        self.policy_version = first_step - 1

    def next_batch(self) -> SampledBatch:
        """Return the groups that the saved run trained on in the next step.

        Counts and means are over the saved groups, so they equal the saved run's if it saved all.
        Raise DataError if the file is damaged, or its groups do not fit the configuration.
        """
        step = self.policy_version + 1
        path = step_file(self._folder, step)
        saved = list(read_rollouts(path))
        for entry in saved:
            for problem in self._problems(entry, step):
                raise DataError(f"{path}: group {entry.prompt_index} {problem}")
        trained = [s for s in saved if s.disposition == "trained"]
        trained.sort(key=lambda s: s.prompt_index)
        if not trained:
            raise DataError(f"{path}: has no group that was trained on")
        batch = SampledBatch(
            to_reserve=_groups(s for s in saved if s.disposition == "to_reserve"),
            dropped=_groups(s for s in saved if s.disposition == "dropped"),
            saved_groups=self._config.observe.saved_groups,
            is_replay=True,
        )
        for generated in (s for s in saved if not s.from_reserve):
            batch.add(generated.group, is_mixed=generated.disposition not in REJECTED)
        size = self._config.groups_per_mini_batch
        batch.take(in_training_order(_groups(trained), self.policy_version, size))
        return batch

    def publish(self, policy_version: int) -> None:
        self.policy_version = policy_version

    def cross_checks(self, group: Group) -> Sequence[bool | None]:
        return [score.symbolic_correct for score in group.scores]

    def _problems(self, saved: SavedGroup, step: int) -> Iterator[str]:
        """Yield the reasons why a group does not fit the configuration."""
        size, expected = len(saved.responses), self._config.sampling.responses_per_prompt
        if saved.step != step:
            yield f"is from step {saved.step}"
        if size < MIN_RESPONSES or size + len(saved.failures) != expected:
            yield f"has {size} responses, but sampling.responses_per_prompt = {expected}"
            return
        longest, limit = max(saved.group.lengths), self._config.rollout.max_response_tokens
        if longest > limit:
            yield f"has a response of {longest} tokens, but rollout.max_response_tokens = {limit}"
        prompt, limit = len(saved.prompt_ids), self._config.data.max_prompt_tokens
        if not 0 < prompt <= limit:
            yield f"has a prompt of {prompt} tokens, but data.max_prompt_tokens = {limit}"
        responses = saved.group.responses
        if self._config.trainer.router_replay and any(
            response.experts is None for response in responses
        ):
            yield "has a response without the experts that trainer.router_replay needs"
        ids = np.concatenate(
            [np.array(saved.prompt_ids), *(response.token_ids for response in responses)]
        )
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            yield f"has tokens outside of the model's vocabulary of {self._vocab_size}"


def _groups(saved: Iterable[SavedGroup]) -> list[Group]:
    return [s.group for s in saved]


def _check_steps(folder: Path, first: int, last: int) -> None:
    """Raise ConfigError unless every step from `first` to `last` is saved."""
    saved = steps_in(folder)
    if not saved:
        raise ConfigError(
            f"--replay {folder}: there is no step-N.jsonl.zst; a run writes them to "
            f'RUN/{ROLLOUTS_FOLDER}, whole batches with observe.saved_groups = "all"'
        )
    missing = sorted(set(range(first, last + 1)) - set(saved))
    if missing:
        raise ConfigError(
            f"--replay {folder}: step {missing[0]} is not saved, but run.num_steps = {last}; "
            f"{len(saved)} steps from {saved[0]} to {saved[-1]} are saved: lower run.num_steps. "
            'A run saves whole batches with observe.saved_groups = "all"'
        )


def _check_whole(config: RunConfig, folder: Path) -> None:
    """Raise ConfigError if the first saved step lacks groups that its run trained on.

    The replay would train another policy.
    """
    run = RunRecords(folder.parent)
    if run.config.get("observe", {}).get("saved_groups") == "all":
        return
    step = steps_in(folder)[0]
    saved = sum(one.disposition == "trained" for one in read_rollouts(step_file(folder, step)))
    trained = int(run.series("groups/kept").get(step, config.sampling.prompts_per_step))
    if saved < trained:
        raise ConfigError(
            f"--replay {folder}: step {step} has {saved} of the {trained} groups that it trained "
            "on, so later weights would be others: repeat the run with observe.saved_groups = "
            '"all" and replay that, or look into these groups with megadapo show'
        )


RULES = ("mode", "prompts_per_step", "max_staleness", "max_asked_per_prompt")
"""Keys of `[sampling]` that a schedule depends on beside those of a group's content."""


def check_schedule(config: RunConfig, run: Path) -> str:
    """Return a note for the user; raise ConfigError if a run's schedule cannot be repeated."""
    path = run / SCHEDULE_FILE
    if not config.sampling.carries:
        raise ConfigError(
            f'--schedule: with sampling.mode = "{config.sampling.mode}" a run repeats itself '
            "without one; leave it out"
        )
    if not path.is_file():
        raise ConfigError(
            f"--schedule {run}: there is no {SCHEDULE_FILE}; only runs with sampling.mode = "
            '"partial" or "async" write one'
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
    """
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
