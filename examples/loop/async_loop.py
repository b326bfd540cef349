"""The same loop asynchronously: the engines generate while the trainer computes.

    python examples/loop/async_loop.py [--section.key=value ...]

A thread fills the next batch during the update. Responses that a publication stops are continued
with the new weights, so a batch has tokens of several policy versions. The update compares each
token with the version that sampled it.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

from loop import RECIPE, make_batch, show, start

from megadapo.config import load_config
from megadapo.data.batch import in_training_order
from megadapo.rollout.sampling.background import BackgroundSampler
from megadapo.trainer.types import UpdateRequest

ASYNC = (
    "sampling.mode=async",
    "sampling.max_staleness=3",
    "cluster.placement=separate",
    "evaluation.every=0",
)


def main() -> None:
    """Train on the next full batch, publish, and repeat, while the sampler's thread works."""
    words = [word.removeprefix("--") for word in sys.argv[1:]]
    config = load_config(RECIPE, [*ASYNC, *words])
    with ExitStack() as stack:
        pieces = start(config, stack)
        engines, trainer, publisher = pieces.engines, pieces.trainer, pieces.publisher
        publisher.publish(policy_version=0)
        sampler = BackgroundSampler(pieces.sampler, config.run.num_steps)
        stack.callback(sampler.close)
        sampler.resume_sampling(policy_version=0)
        for step in range(1, config.run.num_steps + 1):
            sampled = sampler.next_batch()
            groups = in_training_order(sampled.groups, step - 1, config.groups_per_mini_batch)
            batch = make_batch(groups, config)
            engines.on_update_start()
            update = trainer.update(UpdateRequest(batch=batch, step=step, policy_version=step - 1))
            sampler.wait_until_can_pause()
            publisher.publish(step, stop_generating=sampler.pause_for_weights)
            engines.on_update_done()
            sampler.resume_sampling(step)
            show(step, groups, update)


if __name__ == "__main__":
    main()
