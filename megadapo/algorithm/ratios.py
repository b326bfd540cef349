"""Ratios of whole sequences: geometric means over their tokens, bitwise equal under every split.

Source: GSPO (arXiv 2507.18071) equations 7, 13 and 14.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megadapo.algorithm.objective import MAX_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor

_FIXED_POINT = 2.0**36
"""2^63 holds the sum of more than a million log-ratios of MAX_LOG_RATIO at this resolution."""


def sequence_means(
    log_ratios: Tensor,
    sequences: Tensor,
    *,
    num_sequences: int,
    add_up: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Return the mean of each sequence's log-ratios, [S] float64; 0 for a sequence without any.

    Log-ratios are clamped to +-MAX_LOG_RATIO; a NaN makes its own sequence's mean meaningless.

    Args:
        sequences: [N] int64, sequence of each token; all of a sequence's tokens must be here, or on
            ranks that `add_up` reaches.
        add_up: sums a tensor in place over the ranks that share sequences.
    """
    clamped = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # sums of integers have the same bits in every order
    fixed = (clamped.double() * _FIXED_POINT).round().long()
    totals = fixed.new_zeros(2, num_sequences)
    sums, counts = totals[0], totals[1]
    sums.index_add_(0, sequences, fixed)
    counts.index_add_(0, sequences, fixed.new_ones(len(fixed)))
    if add_up is not None:
        add_up(totals)
    return sums.double() / _FIXED_POINT / counts.clamp(min=1)


def sequence_shifted(
    logprobs: Tensor,
    logprobs_old: Tensor,
    sequences: Tensor,
    *,
    num_sequences: int,
    add_up: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Return old log-probs that give every token the ratio of its sequence, [N].

    With s_i the geometric mean of a sequence's ratios they are log pi - log s_i, detached. A
    token's ratio then has the value s_i and the derivative s_i in the token's log-prob. That is
    GSPO-token (equation 14), and GSPO if a sequence has one advantage. A mean at the clamp's edge
    is moved beyond it, so that its ratio is constant under any rounding.

    Args:
        logprobs: [N] under the current weights, with the same bits as in the loss.
        logprobs_old: [N], finite.
        sequences: [N] int64, sequence of each token, below `num_sequences`.
    """
    means = sequence_means(
        logprobs - logprobs_old, sequences, num_sequences=num_sequences, add_up=add_up
    )
    means = means.where(means.abs() < MAX_LOG_RATIO, 2.0 * means)
    return (logprobs - means.to(logprobs.dtype)[sequences]).detach()
