"""Which weight publication sampled each token of a response, as JSON keeps it: runs of equal ones.

NO_VERSION stands for tokens that were given, not sampled: what a tool put out.

A response is as a rule sampled from one version, so that one number a token would be waste.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NO_VERSION = -1
"""The policy version of a token that was given, not sampled."""
MAX_VERSION = int(np.iinfo(np.int32).max)


def encode_versions(versions: np.ndarray) -> list[list[int]]:
    """Return [n] versions as [[version, number of tokens], ...]; none for no token."""
    starts = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))
    counts = np.diff(starts, append=len(versions))
    return [[int(versions[i]), int(n)] for i, n in zip(starts, counts, strict=True)]


def decode_versions(runs: int | Sequence[Sequence[int]], num_tokens: int) -> np.ndarray:
    """Return [num_tokens] int32 versions from their runs, or from one number for all of them.

    Raises:
        TypeError, ValueError: they are not the versions of so many tokens.
    """
    pairs = [(runs, num_tokens)] if isinstance(runs, int) else [(v, n) for v, n in runs]
    counts = [count for _, count in pairs]
    if min(counts, default=0) < 0 or sum(counts) != num_tokens:
        raise ValueError(f"policy versions {runs} are not those of {num_tokens} tokens")
    if any(not NO_VERSION <= version <= MAX_VERSION for version, _ in pairs):
        raise ValueError(f"policy versions {runs} are not all from {NO_VERSION} to {MAX_VERSION}")
    versions = np.array([version for version, _ in pairs], dtype=np.int32)
    return np.repeat(versions, counts)
