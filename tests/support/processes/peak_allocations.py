"""Peak memory of torch's allocator in a trainer rank on the CPU.

Runs inside the trainer processes and counts from the rank's first tensor on, so the peak of an
update includes everything allocated before.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megadapo.data.batch import PackedBatch
from megadapo.trainer.types import Rendezvous, TrainerSettings, UpdateRequest

if TYPE_CHECKING:
    import torch

_STARTED = "tests::started"


@dataclass(frozen=True)
class Allocated:
    """Bytes of one rank."""

    state: int
    """Before the first update."""
    peak: int
    """Most at any moment of an update."""


def allocated(rendezvous: Rendezvous, settings: TrainerSettings, batch: PackedBatch) -> Allocated:
    """Start a rank and let it train on the batch."""
    import torch

    from megadapo.trainer.rank import TrainerRank

    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        rank = TrainerRank(settings, rendezvous)
        gc.collect()
        with torch.profiler.record_function(_STARTED):
            pass
        # once: Gloo's threads free copies of the first update's gradients whenever they like
        rank.update(UpdateRequest(batch=batch, policy_version=0, step=1))
    return _largest(profile)


def _largest(profile: torch.profiler.profile) -> Allocated:
    events = profile.profiler.kineto_results.events()
    started = next(event.start_ns() for event in events if event.name() == _STARTED)
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    total = state = peak = 0
    for when, num_bytes in changes:
        total += num_bytes
        if when < started:
            state = total
        else:
            peak = max(peak, total)
    return Allocated(state=state, peak=peak)
