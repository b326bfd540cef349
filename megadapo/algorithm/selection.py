"""Dynamic sampling: which groups carry a gradient (DAPO, arXiv 2503.14476, equation 11)."""

from __future__ import annotations

from collections.abc import Sequence


def has_signal(correct: Sequence[bool]) -> bool:
    """True where 0 < number correct < G.

    Looks at correctness and never at the shaped reward: wrong answers that differ only in length
    have different shaped rewards, and training on them teaches length alone.
    """
    return any(correct) and not all(correct)
