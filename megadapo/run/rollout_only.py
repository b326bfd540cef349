"""Sampling and scoring without a trainer, to inspect prompts and rewards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megadapo.cluster.process_log import LOGS_FOLDER
from megadapo.config import RunConfig, to_dict
from megadapo.data.answered import AnswerEncoder, CorrectRows
from megadapo.data.pairs import PairRows
from megadapo.errors import ConfigError
from megadapo.observe.files import replace_text
from megadapo.observe.metrics.records import METRICS_FILE
from megadapo.observe.rollouts.files import ROLLOUTS_FOLDER, rollouts_path, write_rollouts
from megadapo.observe.run_records import RESOLVED_FILE
from megadapo.rewards.verifier import SYMBOLIC_SECONDS_PER_MINUTE
from megadapo.rollout.episodes.requests import EpisodeRequests
from megadapo.rollout.sampling.sampler import Sampler
from megadapo.rollout.sampling.statistics import SampledBatch
from megadapo.run.inputs import Phases, SamplingInputs, load_tokenizer
from megadapo.run.processes import start_engines_alone
from megadapo.run.state.checkpoint import CHECKPOINTS
from megadapo.run.state.lease import Lease
from megadapo.run.step.saved_groups import saved_groups
from megadapo.run.step.training import make_batch
from megadapo.weights.disk.files import sync_path

SUFFIX = "-rollout"
Keep = Literal["correct", "pairs"]
"""Rows that can be made of rollouts: for supervised fine-tuning, or for a reward model."""
KEPT_FILES: dict[Keep, str] = {"correct": "correct.jsonl", "pairs": "pairs.jsonl"}
"""Files of these rows in the folder of rollouts."""
RESULTS = (*KEPT_FILES.values(), ROLLOUTS_FOLDER, RESOLVED_FILE)
UNFINISHED, COMPLETE = "unfinished", "complete"
"""Folders of new results in the folder of rollouts: of all steps so far, and before their move."""
_MOVED = "moved"
"""File in the second one: the earlier results are in it."""


@dataclass(frozen=True, kw_only=True)
class RolloutStep:
    """One step's batch and its cross-check."""

    step: int
    sampled: SampledBatch
    num_disagreements: int
    """Number of responses on which the rule and the symbolic comparison differ."""


@contextmanager
def start_rollouts(
    config: RunConfig, phases: Phases, show: Callable[[str], None]
) -> Iterator[tuple[Callable[[int], RolloutStep], EpisodeRequests]]:
    """Start scorer and engines with the weights of model.path; end them on exit.

    Results are written to a folder of their own, and replace earlier ones if no error ends the
    block. `show` gets each warning, after the step that it is about or after an error.

    Yield a function that samples and scores the batch of a step, and saves its groups; and what
    knows the prompts' environments.
    """
    folder = _prepare_folder(config)
    with ExitStack() as stack:
        lease = stack.enter_context(closing(Lease.take(folder)))
        _begin(config)
        inputs = SamplingInputs.start(config, phases, stack)
        engines, host = start_engines_alone(config, phases, stack, log_folder=folder / LOGS_FOLDER)
        sampler = inputs.sampler(config, engines)

        def sample(step: int) -> RolloutStep:
            lease.check()
            try:
                return _sample(config, folder / UNFINISHED, sampler, inputs, step)
            finally:
                of_host = [] if host is None else host.drain_warnings()
                for line in (*engines.drain_warnings(), *of_host, *inputs.scorer.drain_warnings()):
                    show(line)

        yield sample, inputs.episodes
        lease.check()
        for path in (folder / UNFINISHED).rglob("*"):
            sync_path(path)
        (folder / UNFINISHED).rename(folder / COMPLETE)
        _replace_results(folder)


def _begin(config: RunConfig) -> None:
    """Create the folder of results that are not complete, without those of a killed command."""
    folder = rollout_folder(config)
    if (folder / COMPLETE).exists():
        _replace_results(folder)
    if (folder / UNFINISHED).exists():
        shutil.rmtree(folder / UNFINISHED)
    (folder / UNFINISHED).mkdir(mode=0o700)
    text = json.dumps(to_dict(config), indent=2) + "\n"
    replace_text(folder / UNFINISHED / RESOLVED_FILE, text)


def _replace_results(folder: Path) -> None:
    """Put complete results in the place of earlier ones.

    After a kill the next command continues, so there is never a mixture of both.
    """
    complete = folder / COMPLETE
    for name in RESULTS:
        if not (complete / _MOVED).exists() and (folder / name).exists():
            (folder / name).rename(complete / f"earlier-{name}")
    (complete / _MOVED).touch()
    for name in RESULTS:
        if (complete / name).exists():
            (complete / name).rename(folder / name)
    shutil.rmtree(complete)


def _sample(
    config: RunConfig, folder: Path, sampler: Sampler, inputs: SamplingInputs, step: int
) -> RolloutStep:
    verifier = inputs.verifier
    before = verifier.counts.num_disagreements
    sampled = sampler.next_batch()
    inputs.scorer.check_step()
    inputs.start_cross_check(sampled)
    # without an update there is no idle time for the cross-check
    verifier.finish_cross_check(SYMBOLIC_SECONDS_PER_MINUTE)
    if sampled.saved:
        # these engines never get other weights
        batch, advantages = make_batch(sampled, config, policy_version=0)
        saved = saved_groups(
            step,
            sampled,
            batch.recorded,
            advantages,
            None,
            config,
            inputs.tokenizer,
            inputs.cross_checks,
        )
        write_rollouts(rollouts_path(folder, step), saved)
    num_disagreements = verifier.counts.num_disagreements - before
    return RolloutStep(step=step, sampled=sampled, num_disagreements=num_disagreements)


def keeping_every_group(config: RunConfig, keep: Keep) -> RunConfig:
    """Return a configuration whose steps have every group that they sample, mixed or not."""
    if config.rollout.environments and keep == "pairs":
        raise ConfigError(
            "--keep pairs: rollout.environments puts answers into responses, and a loss of pairs "
            "would count them: leave it out, or use --keep correct"
        )
    observe = config.observe.model_copy(update={"saved_groups": "all"})
    sampling = config.sampling.model_copy(update={"selection": "all"})
    return config.model_copy(update={"observe": observe, "sampling": sampling})


def kept_rows(
    config: RunConfig, keep: Keep, episodes: EpisodeRequests, *, max_per_prompt: int | None
) -> CorrectRows | PairRows:
    """Begin the file of rows in the folder of rollouts that are not complete."""
    path = rollout_folder(config) / UNFINISHED / KEPT_FILES[keep]
    if keep == "pairs":
        return PairRows(path, max_per_prompt=max_per_prompt)
    encoder = AnswerEncoder(
        load_tokenizer(config),
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    return CorrectRows(path, encoder, episodes.tools, max_per_prompt=max_per_prompt)


def rollout_folder(config: RunConfig) -> Path:
    """Return the folder of rollouts without a trainer, beside the run's folder."""
    folder = config.run.folder
    return folder.with_name(folder.name + SUFFIX)


def _prepare_folder(config: RunConfig) -> Path:
    """Create the folder and return it, unless it holds a run or the model has no weights."""
    if config.model.init == "random":
        raise ConfigError(
            'model.init = "random" leaves engines without weights: set model.path to a model with '
            "weights, such as a folder that megadapo export wrote"
        )
    folder = rollout_folder(config)
    for name in (METRICS_FILE, CHECKPOINTS):
        if (folder / name).exists():
            raise ConfigError(
                f"{folder} holds a run ({name}), but megadapo rollout writes to this folder "
                f"(run.folder with {SUFFIX} appended): choose another run.folder"
            )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be created: {error.strerror}") from error
    return folder
