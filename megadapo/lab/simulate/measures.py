"""Measures of simulated steps: ages of tokens, the bias of lengths, standard errors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megadapo.lab.simulate.engines import VirtualEngines
from megadapo.lab.simulate.policies import TrainedGroup


@dataclass(frozen=True)
class SampledStep:
    """A batch and the time until it was there."""

    seconds: float
    version: int
    """Version of the engines' weights."""
    groups: Sequence[TrainedGroup]


def standard_error(seconds: Sequence[float]) -> float | None:
    """Return the standard error of a mean; None for one number."""
    if len(seconds) < 2:
        return None
    return float(np.std(seconds, ddof=1)) / math.sqrt(len(seconds))


def token_ages(steps: Sequence[SampledStep], versions_behind: int = 0) -> Counter[int]:
    """Count tokens by their age, in publications.

    `versions_behind`: publications between a step's version and the weights that train on it.
    """
    ages: Counter[int] = Counter()
    for step in steps:
        for group in step.groups:
            ages += _ages(group, step.version + versions_behind)
    return ages


def mean_age(ages: Mapping[int, int]) -> float:
    """Return the mean age of tokens."""
    return sum(age * number for age, number in ages.items()) / sum(ages.values())


def length_bias(
    steps: Sequence[SampledStep], engines: VirtualEngines, *, is_redrawn: bool
) -> float:
    """Return by how much trained groups are longer than all mixed groups requested, as a share.

    It compares the groups between the first and the last trained one.

    Args:
        is_redrawn: whether a group that misses a batch draws new responses; it continues otherwise.
    """
    versions = {
        group.prompt_index: int(group.policy_versions[0][0])
        for step in steps
        for group in step.groups
    }
    trained = np.mean([engines.requested[index].lengths.mean() for index in versions])
    mixed = np.mean(
        [
            (
                engines.draw(index, versions[index]) if is_redrawn and index in versions else draw
            ).lengths.mean()
            for index, draw in engines.requested.items()
            if min(versions) <= index <= max(versions) and draw.is_mixed
        ]
    )
    return float(trained / mixed) - 1.0


def _ages(group: TrainedGroup, version: int) -> Counter[int]:
    """Count a group's tokens by the publications between them and `version`."""
    ages: Counter[int] = Counter()
    for versions in group.policy_versions:
        first, last = int(versions[0]), int(versions[-1])
        if first == last:  # versions never decrease
            ages[version - first] += len(versions)
        else:
            for old, number in zip(*np.unique(versions, return_counts=True), strict=True):
                ages[version - int(old)] += int(number)
    return ages
