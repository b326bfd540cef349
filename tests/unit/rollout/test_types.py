"""Seeds and log-probs of engine requests."""

import math
from types import SimpleNamespace

import numpy as np

from megadapo.rollout.types import continued_seed, response_seeds, sampled_logprobs


def test_seeds_are_portable():
    """Python's hash() changes with every process."""
    assert response_seeds(2, 7, "train", 12, "id-3") == (
        533624804054033046,
        272604831935903300,
    )


def test_every_part_changes_the_seed():
    names = [
        (run_seed, purpose, index, prompt)
        for run_seed in (0, 1)
        for purpose in ("train", "evaluation")
        for index in range(20)
        for prompt in ("a", "b")
    ]
    seeds = [seed for name in names for seed in response_seeds(16, *name)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def table(entries):
    """Return a table of (token, log-prob) pairs per position."""
    ends = np.cumsum([len(position) for position in entries]).tolist()
    flat = [pair for position in entries for pair in position]
    return SimpleNamespace(
        start_indices=[0, *ends[:-1]],
        end_indices=ends,
        token_ids=[token for token, _ in flat],
        logprobs=[value for _, value in flat],
    )


def test_sampled_token_is_found_among_others():
    """The first entry of a position is the most probable token."""
    values = sampled_logprobs([5, 9], table([[(5, -0.5)], [(7, -0.1), (9, -3.0)]]))
    assert values.dtype == np.float32
    assert values.tolist() == [-0.5, -3.0]


def test_missing_log_prob_is_nan():
    """A value of 0.0 would mean that the token was certain."""
    values = sampled_logprobs([5, 6, 7, 8], table([[(5, -0.5)], [], [(1, -0.1)], [(8, None)]]))
    assert values[0] == np.float32(-0.5)
    assert all(math.isnan(value) for value in values[1:])
    assert np.isnan(sampled_logprobs([1, 2], None)).all()
    assert np.isnan(sampled_logprobs([5, 6], table([[(5, -0.5)]]))).tolist() == [False, True]


def test_one_entry_per_position():
    """This case has a fast path."""
    values = sampled_logprobs([5, 6, 7], table([[(5, -0.5)], [(6, None)], [(7, -2.0)]]))
    assert values.dtype == np.float32
    assert values[[0, 2]].tolist() == [-0.5, -2.0] and math.isnan(values[1])
    # as many entries as positions, but not one per position
    shifted = sampled_logprobs([5, 6], table([[(5, -0.5), (6, -0.1)], []]))
    assert shifted[0] == -0.5 and math.isnan(shifted[1])


def test_continued_response_has_new_noise():
    """The old seed would repeat the same noise for other tokens."""
    begun = np.array([3, 4, 5], dtype=np.int32)
    seeds = {continued_seed(seed, begun[:n]) for seed in (1, 2) for n in range(4)}
    assert len(seeds) == 8 and all(0 <= seed < 2**63 for seed in seeds)
    assert continued_seed(1, begun[:0]) == 1
    assert continued_seed(1, begun) == continued_seed(1, begun.copy())
    assert continued_seed(1, begun) != continued_seed(1, begun[::-1].copy())
