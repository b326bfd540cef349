"""Dynamic sampling: which groups carry a gradient (DAPO, arXiv 2503.14476, equation 11)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megadapo.algorithm.advantages import ROUNDING, process_advantages
from megadapo.algorithm.groups import ScoredGroup
from megadapo.algorithm.shaping import complete_steps


def is_mixed(
    correct: Sequence[bool], *, min_accuracy: float = 0.0, max_accuracy: float = 1.0
) -> bool:
    """True where min_accuracy < number correct / G < max_accuracy.

    Looks at correctness and never at the shaped reward: wrong answers that differ only in length
    have different shaped rewards, and training on them teaches length alone.
    """
    return min_accuracy < sum(correct) / len(correct) < max_accuracy


def has_mixed_steps(group: ScoredGroup) -> bool:
    """True where a token gets an advantage other than 0 from its steps, punishments left out.

    Groups that are all right or all wrong have one too where their steps differ.
    """
    found = process_advantages(complete_steps(group), group.lengths)
    return any((np.abs(own) > ROUNDING).any() for own in found)
