"""How long responses get: a distribution that normal scores are turned into lengths with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from megadapo.errors import ConfigError, DataError
from megadapo.observe.metrics.records import MetricRecord, read_metrics
from megadapo.observe.rollouts.files import read_rollouts, rollouts_path, saved_steps

NORMAL_95 = 1.6448536269514722
"""The normal score that 95 % lie below."""
_SCORES = np.linspace(-6.0, 6.0, 2401)
_SHARES = np.array([0.5 * math.erfc(-score / math.sqrt(2.0)) for score in _SCORES])


class Lengths(Protocol):
    """A distribution of response lengths."""

    def at(self, scores: np.ndarray) -> np.ndarray:
        """Turn standard normal scores into lengths in tokens, at least 1, before any cap."""
        ...


@dataclass(frozen=True)
class LogNormalLengths:
    """exp(mu + sigma * score)."""

    mu: float
    sigma: float

    @classmethod
    def of(cls, mean: float, quantile_95: float) -> LogNormalLengths:
        """Return the distribution with this mean, 95 % of it below `quantile_95`.

        Of the two that there are, the one with the lighter tail.

        Raises:
            ConfigError: no log-normal distribution has both.
        """
        ratio = math.log(quantile_95 / mean) if 0.0 < mean < quantile_95 else math.nan
        square = NORMAL_95**2 - 2.0 * ratio
        if not square >= 0.0:
            raise ConfigError(
                f"no log-normal distribution has a mean of {mean:g} and 95 % below "
                f"{quantile_95:g} tokens: the second number must be 1 to 3.8 times the first"
            )
        sigma = NORMAL_95 - math.sqrt(square)
        return cls(math.log(mean) - 0.5 * sigma * sigma, sigma)

    def at(self, scores: np.ndarray) -> np.ndarray:
        lengths: np.ndarray = np.rint(np.exp(self.mu + self.sigma * scores)).astype(np.int64)
        return lengths.clip(1)


class EmpiricalLengths:
    """The distribution of lengths that were measured."""

    def __init__(self, lengths: Sequence[int]) -> None:
        if not len(lengths) or min(lengths) < 1:
            raise DataError("lengths of responses are numbers of tokens, at least one of them")
        self._sorted = np.sort(np.asarray(lengths, dtype=np.int64))

    def at(self, scores: np.ndarray) -> np.ndarray:
        shares = np.interp(scores, _SCORES, _SHARES)
        places = np.minimum((shares * len(self._sorted)).astype(int), len(self._sorted) - 1)
        lengths: np.ndarray = self._sorted[places]
        return lengths


def read_lengths(path: Path) -> Lengths:
    """Read lengths from a file with a number a line, or from the folder of a run.

    Raises:
        DataError: there are none; it names the file.
    """
    if path.is_dir():
        return run_lengths(path)
    try:
        words = path.read_text(encoding="utf-8").split()
        return EmpiricalLengths([int(word) for word in words])
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a file of lengths, one a line: {error}") from error
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def run_lengths(folder: Path) -> Lengths:
    """Return the lengths of a run: of its saved groups, else as its metrics describe them.

    Saved groups are chosen by their fate, so where few of many are saved they are a sample that
    leans towards what was trained on; the metrics are then the better source.
    """
    records = read_metrics(folder)
    num_sampled = sum(record.get("groups/sampled") or 0 for record in records)
    groups = [group for step in saved_steps(folder) for group in _saved(folder, step)]
    if groups and len(groups) >= 0.9 * num_sampled:
        return EmpiricalLengths([length for group in groups for length in group])
    if records:
        return step_lengths(records[-1])
    raise DataError(f"{folder}: neither saved rollouts nor metrics: not the folder of a run")


def step_lengths(record: MetricRecord) -> Lengths:
    """Return the log-normal distribution that a step's mean and 95th percentile describe."""
    mean, quantile_95 = record["response_length/mean"], record["response_length/p95"]
    assert mean is not None, "every step has the mean length of its responses"
    assert quantile_95 is not None, "every step has its lengths' 95th percentile"
    largest = mean * math.exp(0.5 * NORMAL_95**2)
    # a mean above the percentile, or far below it, is not log-normal: the nearest one that is
    return LogNormalLengths.of(mean, float(np.clip(quantile_95, 1.0001 * mean, 0.9999 * largest)))


def _saved(folder: Path, step: int) -> list[list[int]]:
    """Lengths of the responses of each group saved in a step."""
    return [
        [len(response.token_ids) for response in group.responses]
        for group in read_rollouts(rollouts_path(folder, step))
    ]
