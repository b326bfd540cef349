"""Assignment of a step's groups to optimizer updates; a group is never split."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def mini_batch_sizes(num_groups: int, groups_per_mini_batch: int) -> list[int]:
    """Return the groups of each update: as few updates as the limit allows, of even sizes.

    Without even sizes a short step could end with an update of a single group at the full learning
    rate. Sizes differ by at most one group, larger ones first.
    """
    num_updates = -(-num_groups // groups_per_mini_batch)
    if not num_updates:
        return []
    size, rest = divmod(num_groups, num_updates)
    return [size + 1] * rest + [size] * (num_updates - rest)


def mini_batches(
    group_sizes: Sequence[int], size: int, *, planned: int | None = None
) -> tuple[np.ndarray, ...]:
    """Return the indices of the responses of each update, in order.

    Args:
        size: planned responses per update, a multiple of every group's size; if a group is larger,
            each group is an update of its own.
        planned: planned responses per group, of which failures may have lost some; None: those of
            the largest group.
    """
    ends = np.cumsum([0, *group_sizes])
    largest = max(group_sizes, default=1)
    groups_per_mini_batch = max(1, size // max(largest, planned or 1))
    sizes = mini_batch_sizes(len(group_sizes), groups_per_mini_batch)
    bounds = ends[np.cumsum([0, *sizes])]
    return tuple(np.arange(a, b) for a, b in zip(bounds, bounds[1:], strict=False))


def update_order(num_mini_batches: int, passes: int, *, seed: int, step: int) -> list[int]:
    """Return the mini-batch of each update of a step: in turn, then in a new order for each pass.

    The first pass keeps the order of the batch. The order of a later pass depends only on the seed,
    the step and the pass, so it is the same on all ranks and after a restart.
    """
    order = list(range(num_mini_batches))
    for number in range(1, passes):
        generator = np.random.default_rng((seed, step, number))
        order += generator.permutation(num_mini_batches).tolist()
    return order


def spread_stale(is_stale: Sequence[bool], groups_per_mini_batch: int) -> list[int]:
    """Order a step's groups so that stale ones are spread evenly over the updates.

    Stale groups at the front would all be in the step's first updates, in which the clip has no
    effect yet. Stale and fresh groups each keep their order.

    Args:
        is_stale: [groups] whether earlier weights sampled any of a group's tokens.
        groups_per_mini_batch: planned groups per update; see `mini_batch_sizes`.

    Returns:
        The groups' indices in training order.
    """
    stale = [index for index, old in enumerate(is_stale) if old]
    fresh = [index for index, old in enumerate(is_stale) if not old]
    order: list[int] = []
    taken = end = 0
    for size in mini_batch_sizes(len(is_stale), groups_per_mini_batch):
        end += size
        # rounded to nearest, so that shares differ by at most one group
        due = (2 * end * len(stale) + len(is_stale)) // (2 * len(is_stale))
        order += stale[taken:due]
        order += fresh[end - size - taken : end - due]
        taken = due
    return order
