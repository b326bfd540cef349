"""Sampling and scoring as a run does it, without a trainer: for looking at prompts and rewards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from megadapo.cluster.process_log import LOGS_FOLDER
from megadapo.config import RunConfig, to_dict
from megadapo.config.recipe import RESOLVED_FILE
from megadapo.errors import ConfigError
from megadapo.observe.metrics.records import METRICS_FILE
from megadapo.observe.rollouts.files import rollouts_path, saved_steps, write_rollouts
from megadapo.rollout.sampling.sampled_batch import SampledBatch
from megadapo.rollout.sampling.sampler import Sampler
from megadapo.run.sampling import Phases, Questions, start_engines_alone
from megadapo.run.state.checkpoint import CHECKPOINTS
from megadapo.run.step_rollouts import saved_groups
from megadapo.run.training import make_batch

SUFFIX = "-rollout"


@dataclass(frozen=True, kw_only=True)
class RolloutStep:
    """One step's batch and what the verifier made of it."""

    step: int
    sampled: SampledBatch
    num_disagreements: int
    """Responses on which the string rule and the symbolic comparison differ."""


class RolloutOnly:
    """Engines with the model's own weights, and the sampler of a run that begins with them."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        sampler: Sampler,
        questions: Questions,
    ) -> None:
        self._config = config
        self._folder = folder
        self._sampler = sampler
        self._questions = questions

    @classmethod
    @contextmanager
    def start(cls, config: RunConfig, phases: Phases) -> Iterator[RolloutOnly]:
        """Start verifier and engines; they have ended when this returns.

        Raises:
            ConfigError: there are no weights to sample from, or a run is in the way.
            DataError: prompts, gold answers or the tokenizer cannot be used.
            InfraError: a process did not start.
        """
        folder = prepare_folder(config)
        with ExitStack() as stack:
            questions = Questions.start(config, phases, stack)
            engines = start_engines_alone(config, phases, stack, log_folder=folder / LOGS_FOLDER)
            sampler = questions.sampler(config, engines)
            yield cls(config, folder, sampler, questions)

    def sample(self, step: int) -> RolloutStep:
        """Sample and score the batch of a step, and save its groups.

        Raises:
            SamplingError: too few groups have a signal.
            InfraError: an engine failed, or the disk is full.
        """
        config, verifier = self._config, self._questions.verifier
        before = verifier.num_disagreements
        sampled = self._sampler.next_batch()
        self._questions.ask_cross_check(sampled)
        # there is no trainer whose time it could use
        verifier.finish_cross_check(config.reward.symbolic_seconds_per_minute)
        if sampled.saved:
            saved = saved_groups(
                step,
                sampled,
                make_batch(sampled, config).advantages,
                None,
                config,
                self._questions.tokenizer,
                self._questions.cross_checks,
            )
            write_rollouts(rollouts_path(self._folder, step), saved)
        return RolloutStep(
            step=step,
            sampled=sampled,
            num_disagreements=verifier.num_disagreements - before,
        )


def rollout_folder(config: RunConfig) -> Path:
    """Return where rollouts without a trainer go: beside the run, never into it."""
    folder = config.run.folder
    return folder.with_name(folder.name + SUFFIX)


def prepare_folder(config: RunConfig) -> Path:
    """Make the folder, empty of rollouts of before, and return it.

    Raises:
        ConfigError: the model has no weights, a run is in the way, or it cannot be made.
    """
    if config.model.init == "random":
        raise ConfigError(
            'model.init = "random" leaves engines without weights: name a model that has some in '
            "model.path, such as a folder that megadapo export wrote"
        )
    folder = rollout_folder(config)
    for name in (METRICS_FILE, CHECKPOINTS):
        if (folder / name).exists():
            raise ConfigError(
                f"{folder} holds a run ({name}): choose another run.folder; rollouts go to "
                f"run.folder + {SUFFIX}"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for step in saved_steps(folder):
            rollouts_path(folder, step).unlink()
        (folder / RESOLVED_FILE).write_text(json.dumps(to_dict(config), indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}") from error
    return folder
