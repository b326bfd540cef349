"""A saved step of a run: its groups, its metrics, its old log-probs, and the weights around it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megadapo.config import RunConfig
from megadapo.data.batch import PackedBatch
from megadapo.data.group import NO_VERSION
from megadapo.errors import DataError
from megadapo.observe.metrics.records import MetricRecord, read_metrics
from megadapo.observe.rollouts.files import (
    ROLLOUTS_FOLDER,
    read_rollouts,
    rollouts_path,
    saved_steps,
)
from megadapo.rollout.sampling.sampled_batch import SampledBatch
from megadapo.run.replay import ReplayedRollouts
from megadapo.run.state.checkpoint import Checkpoint, load
from megadapo.run.state.checkpoint_store import CHECKPOINTS, step_folders, step_of


@dataclass(frozen=True, kw_only=True)
class StepWeights:
    """The policy's weights after a step."""

    step: int
    """0: the weights in model.path, with which a run starts."""
    checkpoint: Checkpoint | None
    """Checkpoint of that step; none for step 0."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedStep:
    """The groups that a run trained on in a step, as far as it saved them."""

    step: int
    sampled: SampledBatch
    num_groups: int
    """Number of groups that the run trained on in the step."""
    metrics: MetricRecord
    """Metrics that the run recorded; empty if it ended before."""

    @property
    def is_whole(self) -> bool:
        return len(self.sampled.groups) == self.num_groups


def read_step(config: RunConfig, step: int) -> SavedStep:
    """Read the groups of a step from the run's folder.

    Raises:
        DataError: none are saved, or the file is damaged.
    """
    folder = config.run.folder
    steps = saved_steps(folder)
    if step not in steps:
        saved = f"it has those of {len(steps)} steps, {steps[0]} to {steps[-1]}" if steps else ""
        raise DataError(
            f"{folder} has no saved groups of step {step}; "
            + (saved or 'a run saves whole batches with observe.saved_groups = "all"')
        )
    # the copied run ends here, because later steps may not be saved
    run = config.run.model_copy(update={"num_steps": step})
    until = config.model_copy(update={"run": run})
    sampled = ReplayedRollouts(until, folder / ROLLOUTS_FOLDER, first_step=step).next_batch()
    metrics = next((record for record in read_metrics(folder) if record["step"] == step), {})
    return SavedStep(
        step=step,
        sampled=sampled,
        num_groups=int(metrics.get("groups/kept") or config.sampling.prompts_per_step),
        metrics=metrics,
    )


def saved_logprobs(config: RunConfig, saved: SavedStep, batch: PackedBatch) -> np.ndarray:
    """Return the trainer's log-probs before the step's updates, [T] float32.

    NaN where none is saved: on prompts, on tokens without a loss, and on stale tokens if their
    ratio has the engine's log-prob instead.
    """
    path = rollouts_path(config.run.folder, saved.step)
    groups = {
        group.prompt_index: group for group in read_rollouts(path) if group.disposition == "trained"
    }
    responses = (
        response
        for group in saved.sampled.groups
        for response in groups[group.prompt_index].responses
    )
    found = np.full(len(batch.tokens), np.nan, dtype=np.float32)
    starts = batch.cu_seqlens[:-1] + batch.prompt_lengths
    for start, stop, response in zip(starts, batch.cu_seqlens[1:], responses, strict=True):
        if response.logprobs_old is not None:
            found[start:stop] = response.logprobs_old
    if config.algorithm.importance.stale_logprobs == "rollout":
        versions = batch.policy_versions
        found[(versions != NO_VERSION) & (versions != saved.step - 1)] = np.nan
    return found


def weights_before(folder: Path, step: int) -> StepWeights:
    """Return the newest weights of the run from before a step."""
    earlier = [path for path in step_folders(folder / CHECKPOINTS) if step_of(path) < step]
    if not earlier:
        return StepWeights(step=0, checkpoint=None)
    # the ranks that read its files hash them
    return StepWeights(step=step_of(earlier[-1]), checkpoint=load(earlier[-1], hashes=False))


def weights_after(folder: Path, step: int) -> Checkpoint | None:
    """Return the checkpoint of a step if the run has kept it."""
    for path in step_folders(folder / CHECKPOINTS):
        if step_of(path) == step:
            return load(path, hashes=False)
    return None
