"""Measurements of `megadapo whatif` inside the trainer processes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megadapo.data.batch import PackedBatch
from megadapo.lab.whatif.types import Measured, OldNumbers, Variant
from megadapo.trainer.types import Metrics
from tests.support.trainer.probes import build, update


def measured_twice(
    rendezvous, settings, variants: Sequence[Variant], old: np.ndarray
) -> tuple[list[Measured], list[Measured], np.ndarray | None, bool]:
    """Return the numbers with current and with given old log-probs, and the current log-probs.

    The last value says whether all objectives shared one forward pass.
    """
    from megadapo.lab.whatif.measure import measure, shares_forward

    rank = build(rendezvous, settings)
    first, current = measure(rank, variants, 0, None)
    second, _ = measure(rank, variants, 0, OldNumbers(logprobs=old))
    logprobs = None if current is None else current.logprobs
    return first, second, logprobs, shares_forward(rank)


def with_moved_reference(rendezvous, settings, variants: Sequence[Variant]) -> list[list[Measured]]:
    """Return numbers before the reference policy moves; after it, from old ones and from new."""
    from megadapo.lab.whatif.measure import measure

    rank = build(rendezvous, settings)
    first, old = measure(rank, variants, 0, None)
    assert rank.reference is not None
    for weights in rank.reference._weights.values():
        weights.mul_(1.5)
    return [first, *(measure(rank, variants, 0, given)[0] for given in (old, None))]


def first_update(rendezvous, settings, batch: PackedBatch) -> Metrics:
    return update(build(rendezvous, settings), batch, step=1).metrics


def beside_second_update(
    rendezvous, settings, variants: Sequence[Variant], policy_version: int, number: int = 0
) -> tuple[Measured, Metrics]:
    """Return an objective's numbers after one update, and the metrics of the next one."""
    from megadapo.lab.whatif.measure import measure

    rank, batch = build(rendezvous, settings), variants[number].batch
    update(rank, batch, step=1, policy_version=policy_version)
    found, _ = measure(rank, variants, policy_version, None)
    return found[number], update(rank, batch, step=2, policy_version=policy_version).metrics
