"""Which responses of a step are behind which optimizer update."""

from __future__ import annotations

import numpy as np


def mini_batches(num_responses: int, size: int) -> tuple[np.ndarray, ...]:
    """Indices of the responses of each update, in order; the last one may be smaller.

    Args:
        num_responses: of the whole step.
        size: responses behind one update.
    """
    return tuple(
        np.arange(start, min(start + size, num_responses))
        for start in range(0, num_responses, size)
    )
