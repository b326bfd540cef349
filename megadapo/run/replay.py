"""Saved rollouts in the place of engines: a trainer alone, on groups that are known.

Groups trained on in step N are read from `step-N.jsonl.zst` and trained on in step N again, in the
same order. parity/* compares the trainer's log-probs with the saved ones of the engine where the
saved policy_version is the replay's own: exact as long as the replay retraces the run that was
saved, and a measure of how far it has left it afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from megadapo.config import RunConfig
from megadapo.data.batch import Group
from megadapo.errors import ConfigError, DataError
from megadapo.models.description import describe_model
from megadapo.models.folder import read_hf_config, resolve_model_folder
from megadapo.observe.rollouts.files import ROLLOUTS_FOLDER, read_rollouts, step_file, steps_in
from megadapo.observe.rollouts.saved_group import SavedGroup
from megadapo.rollout.sampling.sampled_batch import (
    GroupStats,
    RejectedGroups,
    SampledBatch,
    StepCounters,
)
from megadapo.rollout.sampling.selection import in_training_order
from megadapo.run.rollouts import Rollouts

WITHOUT_SIGNAL = ("all_correct", "all_wrong", "out_of_band")
"""Fates of groups that were never fit for a batch."""


def check_replay(config: RunConfig, folder: Path) -> str:
    """Check that a run can replay the rollouts in `folder`; return what to tell the user.

    Raises:
        ConfigError: the run would overwrite what it replays, or is longer than what is saved.
    """
    if (config.run.folder / ROLLOUTS_FOLDER).resolve() == folder.resolve():
        raise ConfigError(
            f"run.folder = {config.run.folder} is the run that {folder} is of: choose another "
            "run.folder for the replay"
        )
    _check_steps(folder, config.run.num_steps, config.run.num_steps)
    return (
        f"replaying {folder}: parity/* compares with the log-probs that are saved, which differ "
        "from the trainer's where the configuration is not that of the run they are of"
    )


class ReplayedRollouts(Rollouts):
    """Saved groups as batches; publishing only counts, as no engine is there to take weights."""

    def __init__(self, config: RunConfig, folder: Path, *, first_step: int) -> None:
        """Check that every step from `first_step` to the last of the run is saved.

        Raises:
            ConfigError: one is not.
            DataError: the model's configuration cannot be read.
        """
        _check_steps(folder, first_step, config.run.num_steps)
        model = resolve_model_folder(config.model.path, with_weights=False)
        self._vocab_size = describe_model(read_hf_config(model)).shape.vocab_size
        self._config = config
        self._folder = folder
        self._policy_version = first_step - 1

    @property
    def policy_version(self) -> int:
        return self._policy_version

    def next_batch(self) -> SampledBatch:
        """Return the groups that were trained on in the step after the published weights.

        Counts and means are over the saved groups: the same as in the run they are of where it
        saved all.

        Raises:
            DataError: the file is damaged, holds no such group, or one that the configuration
                does not allow for.
        """
        step = self._policy_version + 1
        path = step_file(self._folder, step)
        saved = list(read_rollouts(path))
        for group in saved:
            self._check(group, step, path)
        trained = sorted((s for s in saved if s.fate == "trained"), key=lambda s: s.order)
        if not trained:
            raise DataError(f"{path}: holds no group that was trained on")
        generated = [s for s in saved if not s.from_reserve] or trained
        tally = StepCounters(
            outcomes=[
                GroupStats.of(s.group, is_mixed=s.fate not in WITHOUT_SIGNAL, seconds=0.0)
                for s in generated
            ],
            to_reserve=_groups(s for s in saved if s.fate == "to_reserve"),
            dropped=_groups(s for s in saved if s.fate == "dropped"),
            thrown_away=RejectedGroups(self._config.observe.saved_groups),
        )
        for thrown in (s.group for s in saved if s.fate in WITHOUT_SIGNAL):
            tally.thrown_away.add(thrown)
        stale = _groups(s for s in trained if not self._is_fresh(s))
        batch = tally.batch(_groups(trained), stale, self._config.observe.saved_groups)
        return replace(
            batch,
            num_tokens=None,
            num_tokens_stopped=None,
            reward_seconds=None,
            group_seconds=(),
            groups=in_training_order(
                batch.groups, self._policy_version, self._config.groups_per_mini_batch
            ),
        )

    def publish(self, policy_version: int) -> None:
        """Count the version, whose groups come next."""
        self._policy_version = policy_version

    def cross_checks(self, group: Group) -> Sequence[bool | None]:
        """Return what was saved of them."""
        return group.symbolic_correct

    def _is_fresh(self, saved: SavedGroup) -> bool:
        """Whether the weights that sampled a group are, by their number, the present ones."""
        current = self._policy_version
        return not saved.from_reserve and any(
            (response.policy_versions == current).any() for response in saved.responses
        )

    def _check(self, saved: SavedGroup, step: int, path: Path) -> None:
        for problem in self._problems(saved, step):
            raise DataError(f"{path}: group {saved.order} {problem}")

    def _problems(self, saved: SavedGroup, step: int) -> Iterator[str]:
        """Why this run's configuration cannot have sampled a group."""
        size, expected = len(saved.responses), self._config.sampling.responses_per_prompt
        if saved.step != step:
            yield f"is of step {saved.step}"
        if size != expected:
            yield f"has {size} responses, but sampling.responses_per_prompt = {expected}"
            return
        longest, limit = max(saved.group.lengths), self._config.rollout.max_response_tokens
        if longest > limit:
            yield f"has a response of {longest} tokens, but rollout.max_response_tokens = {limit}"
        prompt, limit = len(saved.prompt_ids), self._config.data.max_prompt_tokens
        if not 0 < prompt <= limit:
            yield f"has a prompt of {prompt} tokens, but data.max_prompt_tokens = {limit}"
        if self._config.trainer.router_replay and any(r.experts is None for r in saved.responses):
            yield "has a response without the experts that trainer.router_replay takes over"
        ids = np.concatenate([np.array(saved.prompt_ids), *(r.token_ids for r in saved.responses)])
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            yield f"has tokens that a model with {self._vocab_size} does not know"


def _groups(saved: Iterable[SavedGroup]) -> list[Group]:
    return [s.group for s in saved]


def _check_steps(folder: Path, first: int, last: int) -> None:
    """Every step from `first` to `last` must be saved.

    Raises:
        ConfigError: one is not.
    """
    saved = steps_in(folder)
    if not saved:
        raise ConfigError(
            f"--replay {folder}: there is no step-N.jsonl.zst, as a run writes them to "
            f'RUN/{ROLLOUTS_FOLDER}; with observe.saved_groups = "all" it saves whole batches'
        )
    missing = sorted(set(range(first, last + 1)) - set(saved))
    if missing:
        raise ConfigError(
            f"--replay {folder}: step {missing[0]} is not saved, but run.num_steps = {last}; "
            f"{len(saved)} steps are, {saved[0]} to {saved[-1]}: lower run.num_steps (and "
            "trainer.optimizer.warmup_steps, where that is longer). Whole batches are saved with "
            'observe.saved_groups = "all"'
        )
