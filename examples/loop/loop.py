"""DAPO on one page: load, sample, score, advantages, update, publish.

    python examples/loop/loop.py [--section.key=value ...]

It trains the quickstart with the pieces that `megadapo train` uses, and gets the same numbers. What
a long run needs besides is left out: checkpoints, evaluations, oracles, saved rollouts, restarts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

import torch

from megadapo.cluster.calls import Watch
from megadapo.config import RunConfig, load_config
from megadapo.data.batch import in_training_order
from megadapo.data.group import Group
from megadapo.rollout.pool.publish import Publisher
from megadapo.rollout.sampling.background import BackgroundSampler
from megadapo.rollout.sampling.sampler import Sampler
from megadapo.run.inputs import SamplingInputs, start_cluster
from megadapo.run.processes import GpuSharing, start_processes, trainer_settings
from megadapo.run.step.training import pack_groups
from megadapo.trainer.trainer import Trainer
from megadapo.trainer.types import UpdateRequest, UpdateResult

RECIPE = "configs/quickstart.toml"


@dataclass(frozen=True)
class Pieces:
    """The processes and objects of a loop."""

    sampler: Sampler | BackgroundSampler
    """Requests groups of responses, scores them, and keeps the mixed ones."""
    trainer: Trainer
    publisher: Publisher
    """Sends the trainer's weights to the engines."""
    gpus: GpuSharing
    """Lets the engines sleep while the trainer uses their GPUs, if they share any."""


class Shown:
    """Prints each phase of the start."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        print(name, flush=True)
        return nullcontext()


def start(config: RunConfig, stack: ExitStack) -> Pieces:
    """Load the data and start all processes; they end with `stack`."""
    phases = Shown()
    inputs = SamplingInputs.start(config, phases, stack)
    cluster = start_cluster(config, phases, stack, trains=True, num_engines=config.num_engines)
    settings = trainer_settings(config)
    trainer, engines, _ = start_processes(config, settings, phases, cluster, stack, Watch())
    publisher = Publisher(
        trainer.ranks,
        engines,
        config.weights,
        tensor_parallel=config.rollout.tensor_parallel,
        dtype=getattr(torch, config.model.dtype),
    )
    sampler: Sampler | BackgroundSampler
    sampler = inputs.sampler(config, engines)
    if config.sampling.overlaps:
        # a thread fills the next batches during an update
        sampler = BackgroundSampler(sampler, config.run.num_steps)
        stack.callback(sampler.close)
    return Pieces(sampler, trainer, publisher, GpuSharing(trainer, engines))


def publish(pieces: Pieces, step: int) -> None:
    """Send the weights to the engines, which sample with them from here on."""
    with pieces.gpus.publishing():
        pieces.publisher.publish(step, stop_generating=pieces.sampler.pause_for_weights)
        pieces.sampler.resume_sampling(step)


def show(step: int, groups: Sequence[Group], update: UpdateResult) -> None:
    """Print one line on a step."""
    rewards = [score.reward for group in groups for score in group.scores]
    print(
        f"step={step} reward={sum(rewards) / len(rewards):.4f} "
        f"loss={update.metrics['policy/loss']:.3e} "
        f"first_ratio_error={update.metrics['policy/ratio_first_max_error']} "
        f"stale_tokens={update.metrics['staleness/token_share']:.4f}",
        flush=True,
    )


def train(config: RunConfig, pieces: Pieces) -> None:
    """Sample with the present weights, train on it, publish the new ones, and repeat."""
    publish(pieces, 0)
    for step in range(1, config.run.num_steps + 1):
        sampled = pieces.sampler.next_batch()
        groups = in_training_order(sampled.groups, step - 1, config.groups_per_mini_batch)
        # rewards, advantages, loss weights, packing
        batch, _ = pack_groups(groups, config, policy_version=step - 1)
        pieces.gpus.start_update()
        request = UpdateRequest(batch=batch, step=step, policy_version=step - 1)
        update = pieces.trainer.update(request)
        publish(pieces, step)
        show(step, groups, update)


def main(*overrides: str) -> None:
    """Start everything, and train; `overrides`: keys of the recipe."""
    words = [word.removeprefix("--") for word in sys.argv[1:]]
    config = load_config(RECIPE, [*overrides, *words])
    with ExitStack() as stack:
        train(config, start(config, stack))


if __name__ == "__main__":
    main()
