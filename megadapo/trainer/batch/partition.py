"""Which rank computes which sequence, in which micro-batch; pure and the same on every rank.

Sequences of a mini-batch are shared out over data-parallel ranks by their cost and then packed
into micro-batches under a token budget. Nothing here depends on anything but its arguments.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

LINEAR_FLOPS_PER_HIDDEN = 6
"""Attention scores cost as much as a layer's matrices at about 6 x hidden size tokens of context:
12 H^2 multiply-adds a token for the matrices, 2 H per token of (causally halved) context."""


def sequence_cost(length: int, hidden_size: int) -> float:
    """Compute of a sequence, in units of one token's matrix products."""
    return length * (1.0 + length / (2 * LINEAR_FLOPS_PER_HIDDEN * hidden_size))


def partition(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    token_budget: int,
    hidden_size: int,
    multiple_of: int = 1,
) -> list[list[list[int]]]:
    """Cut one mini-batch into micro-batches.

    Args:
        lengths: [S] tokens of each sequence.
        num_ranks: data-parallel ranks.
        token_budget: most tokens of a micro-batch; a longer sequence is one by itself.
        hidden_size: of the model, for the cost of attention.
        multiple_of: what the number of micro-batches must be a multiple of.

    Returns:
        [rank][micro_batch] -> sequence indices, ascending. Every rank has the same number of
        micro-batches, at least one; some may be empty.
    """
    costs = [sequence_cost(length, hidden_size) for length in lengths]
    shares = balance(range(len(lengths)), costs, num_ranks)
    packed = [first_fit(share, lengths, token_budget) for share in shares]
    needed = max(1, *(len(bins) for bins in packed))
    num_micro_batches = -(-needed // multiple_of) * multiple_of
    return [
        _spread(share, bins, lengths, costs, num_micro_batches, token_budget)
        for share, bins in zip(shares, packed, strict=True)
    ]


def balance(items: Sequence[int], costs: Sequence[float], num_bins: int) -> list[list[int]]:
    """Share items out so that the dearest bin is cheap: dearest item first, to the lightest bin."""
    loads = [(0.0, index) for index in range(num_bins)]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for item in sorted(items, key=lambda item: (-costs[item], item)):
        load, index = heapq.heappop(loads)
        bins[index].append(item)
        heapq.heappush(loads, (load + costs[item], index))
    return [sorted(members) for members in bins]


def first_fit(items: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Pack items into as few bins of `token_budget` tokens as first-fit-decreasing finds."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(items, key=lambda item: (-lengths[item], item)):
        fitting = (index for index, free in enumerate(room) if lengths[item] <= free)
        index = next(fitting, None)
        if index is None:
            bins.append([item])
            room.append(token_budget - lengths[item])
        else:
            bins[index].append(item)
            room[index] -= lengths[item]
    return [sorted(members) for members in bins]


def _spread(
    share: Sequence[int],
    bins: list[list[int]],
    lengths: Sequence[int],
    costs: Sequence[float],
    num_micro_batches: int,
    token_budget: int,
) -> list[list[int]]:
    """Micro-batches of even cost, so that pipeline stages wait less; else the tight packing."""
    even = balance(share, costs, num_micro_batches)
    if all(len(b) <= 1 or sum(lengths[i] for i in b) <= token_budget for b in even):
        return even
    return bins + [[] for _ in range(num_micro_batches - len(bins))]
