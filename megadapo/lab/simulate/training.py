"""Steps with their training on the virtual clock."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megadapo.lab.simulate.engines import VirtualEngines
from megadapo.lab.simulate.policies import TrainedGroup, trained_groups
from megadapo.plan.split import PUBLISH_S, SWITCH_S
from megadapo.rollout.sampling.sampler import Sampler


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """A batch and the time around it."""

    seconds: float
    """From the end of the step before to the end of this one."""
    waited_s: float
    """Seconds in which the trainer had nothing to do."""
    version: int
    """Version of the weights that train on the batch."""
    groups: Sequence[TrainedGroup]
    num_dropped: int


def train(sampler: Sampler, engines: VirtualEngines, train_s: float) -> Iterator[TrainedStep]:
    """Yield steps in which a trainer works on each batch for `train_s`.

    A mode that does not overlap uses the same GPUs for both, and loses SWITCH_S. With GPUs of their
    own, engines stop for PUBLISH_S to take weights.
    """
    overlaps = sampler.config.overlaps
    while True:
        start = engines.now
        while not sampler.can_take:
            sampler.turn()
        batch = sampler.take()
        trained = engines.now + train_s
        waited_s = engines.now - start
        if overlaps:
            _generate(sampler, engines, until=trained)
            while not sampler.can_pause:
                sampler.turn()
            waited_s += engines.now - trained
        sampler.pause_for_weights()
        engines.pass_time(PUBLISH_S if overlaps else train_s + SWITCH_S, have_gpus=overlaps)
        yield TrainedStep(
            seconds=engines.now - start,
            waited_s=waited_s,
            version=engines.policy_version,
            groups=trained_groups(batch),
            num_dropped=batch.num_dropped,
        )
        engines.publish()
        sampler.resume_sampling(engines.policy_version)


def _generate(sampler: Sampler, engines: VirtualEngines, *, until: float) -> None:
    """Let the sampler use the engines until a time on the clock."""
    engines.deadline = until
    while engines.now < until:
        if not sampler.turn():
            # every group that a batch could use has ended
            engines.pass_time(until - engines.now)
    engines.deadline = math.inf
