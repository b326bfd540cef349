"""Which groups of a step are behind which optimizer update; a group is never cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def mini_batch_sizes(num_groups: int, groups_per_mini_batch: int) -> list[int]:
    """Groups behind each update: as few updates as the limit allows, of even sizes.

    A step with fewer groups than planned would otherwise end with an update that a single group
    decides, at the learning rate of all the others. Sizes differ by at most one group, the larger
    ones first.
    """
    num_updates = -(-num_groups // groups_per_mini_batch)
    if not num_updates:
        return []
    size, rest = divmod(num_groups, num_updates)
    return [size + 1] * rest + [size] * (num_updates - rest)


def mini_batches(group_sizes: Sequence[int], size: int) -> tuple[np.ndarray, ...]:
    """Indices of the responses of each update, in order.

    Args:
        group_sizes: responses of each group of the step.
        size: responses behind one update; a multiple of every group's, or a group is an update.
    """
    ends = np.cumsum([0, *group_sizes])
    groups_per_mini_batch = max(1, size // max(group_sizes, default=1))
    sizes = mini_batch_sizes(len(group_sizes), groups_per_mini_batch)
    bounds = ends[np.cumsum([0, *sizes])]
    return tuple(np.arange(a, b) for a, b in zip(bounds, bounds[1:], strict=False))


def spread_stale(is_stale: Sequence[bool], groups_per_mini_batch: int) -> list[int]:
    """Order a step's groups so that every update has its share of those sampled earlier.

    Stale groups in front would all be in the step's first updates, whose clip cannot act yet.
    Stale and fresh ones each keep their order, so a batch of one kind stays as it is.

    Args:
        is_stale: [groups] whether earlier weights sampled any of a group's tokens.
        groups_per_mini_batch: as planned; the sizes are those of `mini_batch_sizes`.

    Returns:
        The groups' indices in training order.
    """
    stale = [index for index, old in enumerate(is_stale) if old]
    fresh = [index for index, old in enumerate(is_stale) if not old]
    order: list[int] = []
    taken = end = 0
    for size in mini_batch_sizes(len(is_stale), groups_per_mini_batch):
        end += size
        # rounded to the nearest, so that shares differ by at most one group
        due = (2 * end * len(stale) + len(is_stale)) // (2 * len(is_stale))
        order += stale[taken:due]
        order += fresh[end - size - taken : end - due]
        taken = due
    return order
