"""Loss reductions as a weight per token, made from the counts of a whole mini-batch.

The loss of a mini-batch is exactly sum_t weight[t] * l_t, so neither it nor its gradient depends
on how the batch is split over ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megadapo.algorithm.config import Aggregation, AlgorithmConfig
from megadapo.algorithm.groups import ScoredGroup
from megadapo.algorithm.mini_batches import mini_batches


def loss_weights(
    groups: Sequence[ScoredGroup],
    config: AlgorithmConfig,
    num_tokens: Sequence[int] | None = None,
    *,
    group_size: int | None = None,
    advantages: np.ndarray | Sequence[np.ndarray] | None = None,
) -> np.ndarray:
    """Return the weight of each sampled token of every response of a step: [S] float64.

    Tokens of tool output have no loss and enter no count. Overlong filtering gives truncated
    responses weight 0 and removes them from every count, and so does degenerate filtering.

    Args:
        num_tokens: [S] tokens of each response in the loss; None: all sampled ones.
        group_size: planned responses per group; None: those of the largest group.
        advantages: [S] of the responses, whose signs the aggregation "balanced" reads.
    """
    sizes = [len(group.lengths) for group in groups]
    lengths = np.array(num_sampled(groups) if num_tokens is None else num_tokens, dtype=np.int64)
    keep = kept_responses(groups, config)
    group_of = np.repeat(np.arange(len(groups)), sizes)
    weights = np.zeros(len(lengths))
    signs = np.zeros(len(lengths))
    if config.loss_aggregation == "balanced":
        assert advantages is not None, "the aggregation needs them"
        # a reward equal to the mean leaves a rounding error
        signs = np.sign(np.round(np.asarray(advantages, dtype=np.float64), 9))
    for indices in mini_batches(sizes, config.responses_per_mini_batch, planned=group_size):
        weights[indices] = sequence_weights(
            lengths[indices],
            group_of[indices],
            config.loss_aggregation,
            keep=keep[indices],
            loss_length=config.loss_length,
            length_exponent=config.length_exponent,
            signs=signs[indices],
        )
    return weights


def num_sampled(groups: Sequence[ScoredGroup]) -> list[int]:
    """Return the number of tokens of each response of a step that a policy sampled: [S]."""
    return [number for group in groups for number in group.num_sampled]


def kept_responses(groups: Sequence[ScoredGroup], config: AlgorithmConfig) -> np.ndarray:
    """Return whether each response of a step is in the loss: [S] bool."""
    truncated = np.array([cut for group in groups for cut in group.truncated], dtype=bool)
    keep: np.ndarray = ~(truncated & config.overlong_filtering)
    if config.degenerate_filtering:
        means = [mean for group in groups for mean in group.mean_logprobs]
        repetitions = [share for group in groups for share in group.repetitions]
        keep &= ~is_gibberish(means, config) & ~is_repetitive(repetitions, config)
    return keep


def is_gibberish(mean_logprobs: Sequence[float], config: AlgorithmConfig) -> np.ndarray:
    """Return whether the policy found each response unlikely as it sampled it: [S] bool.

    A response without log-probs (NaN) is not gibberish.
    """
    return np.array(mean_logprobs, dtype=np.float64) < config.gibberish_below


def is_repetitive(repetitions: Sequence[float], config: AlgorithmConfig) -> np.ndarray:
    """Return whether each response repeats too many of its n-grams: [S] bool."""
    return np.array(repetitions, dtype=np.float64) > config.repetitive_above


def sequence_weights(
    lengths: np.ndarray,
    groups: np.ndarray,
    aggregation: Aggregation,
    *,
    keep: np.ndarray | None = None,
    loss_length: int | None = None,
    length_exponent: float = 1.0,
    signs: np.ndarray | None = None,
) -> np.ndarray:
    """Return the loss weight of each token of each sequence; it is constant within a sequence.

    With S sequences of len_i response tokens, N tokens and K groups in the mini-batch:
    token-mean 1/N (DAPO as implemented in verl), group-token-mean 1/(K * N_group) (the paper's
    equation 8), seq-mean-token-mean 1/(S * len_i) (GRPO), seq-mean-token-sum 1/S (RLOO),
    seq-mean-token-sum-norm 1/(S * loss_length) (Dr. GRPO), seq-sum-token-mean 1/len_i,
    token-sum 1. With alpha = length_exponent, vl is len_i^-alpha / (loss_length * sum_j
    len_j^-alpha) (arXiv 2509.07558). balanced is S_part / (K * S_group * N_part), where the part
    is the sequences of the group with the same sign (arXiv 2605.04077).

    Args:
        lengths: [S] response tokens of each sequence.
        groups: [S] any integer label of the sequence's group.
        keep: [S] False leaves the sequence out of the loss and out of every count.
        loss_length: tokens, for seq-mean-token-sum-norm and vl.
        length_exponent: for vl.
        signs: [S] signs of the sequences' advantages, for balanced.

    Returns:
        [S] float64, 0 for sequences that are left out or empty.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    groups = np.asarray(groups)
    counted = lengths > 0 if keep is None else (lengths > 0) & np.asarray(keep, dtype=bool)
    weights = np.zeros(lengths.shape, dtype=np.float64)
    if not counted.any():
        return weights
    kept_lengths, kept_groups = lengths[counted], groups[counted]
    if aggregation == "balanced":
        assert signs is not None, "loss_weights passes them"
        denominators = _balanced_denominators(kept_lengths, kept_groups, signs[counted])
    else:
        denominators = _denominators(
            kept_lengths, kept_groups, aggregation, loss_length, length_exponent
        )
    weights[counted] = 1.0 / denominators
    return weights


def _balanced_denominators(
    lengths: np.ndarray, groups: np.ndarray, signs: np.ndarray
) -> np.ndarray:
    """Return K S_group N_part / S_part of each sequence; sequences without advantage are a part."""
    _, of_group, group_sizes = np.unique(groups, return_inverse=True, return_counts=True)
    # three parts a group, by sign
    part = 3 * of_group + signs.astype(np.int64)
    _, of_part, part_sizes = np.unique(part, return_inverse=True, return_counts=True)
    tokens_of_part = np.bincount(of_part, weights=lengths)
    denominators: np.ndarray = (
        group_sizes.size * group_sizes[of_group] * tokens_of_part[of_part] / part_sizes[of_part]
    )
    return denominators


def _denominators(
    lengths: np.ndarray,
    groups: np.ndarray,
    aggregation: Aggregation,
    loss_length: int | None,
    length_exponent: float,
) -> np.ndarray:
    num_sequences = lengths.size
    match aggregation:
        case "token-mean":
            return np.full(num_sequences, lengths.sum())
        case "group-token-mean":
            _, index = np.unique(groups, return_inverse=True)
            tokens_of_group = np.bincount(index, weights=lengths)  # [K]
            return tokens_of_group.size * tokens_of_group[index]
        case "seq-mean-token-mean":
            return num_sequences * lengths
        case "seq-mean-token-sum":
            return np.full(num_sequences, num_sequences)
        case "seq-mean-token-sum-norm":
            assert loss_length is not None, "AlgorithmConfig requires it"
            return np.full(num_sequences, num_sequences * loss_length)
        case "seq-sum-token-mean":
            return lengths
        case "token-sum":
            return np.ones(num_sequences)
        case "vl":
            assert loss_length is not None, "AlgorithmConfig requires it"
            scaled: np.ndarray = lengths**length_exponent
            denominators: np.ndarray = loss_length * (1.0 / scaled).sum() * scaled
            return denominators
    raise ValueError(f"unknown loss aggregation {aggregation!r}")
