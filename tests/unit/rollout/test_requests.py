import math
from types import SimpleNamespace

import numpy as np

from megadapo.rollout.requests import response_seeds, sampled_logprobs


def test_seeds_are_the_same_on_every_machine():
    """Python's own hash() changes with every process: resumed runs would draw other responses."""
    assert response_seeds(2, 7, "train", 12, "id-3") == (
        533624804054033046,
        272604831935903300,
    )


def test_every_part_of_the_name_changes_the_seed():
    names = [
        (run_seed, purpose, order, prompt)
        for run_seed in (0, 1)
        for purpose in ("train", "evaluation")
        for order in range(20)
        for prompt in ("a", "b")
    ]
    seeds = [seed for name in names for seed in response_seeds(16, *name)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def table(entries):
    """entries: for each position the (token, log-prob) pairs the engine gave."""
    ends = np.cumsum([len(position) for position in entries]).tolist()
    flat = [pair for position in entries for pair in position]
    return SimpleNamespace(
        start_indices=[0, *ends[:-1]],
        end_indices=ends,
        token_ids=[token for token, _ in flat],
        logprobs=[value for _, value in flat],
    )


def test_the_sampled_tokens_value_is_found_among_others():
    """Taking the first entry of a position would give the most probable token's log-prob."""
    values = sampled_logprobs([5, 9], table([[(5, -0.5)], [(7, -0.1), (9, -3.0)]]))
    assert values.dtype == np.float32
    assert values.tolist() == [-0.5, -3.0]


def test_a_missing_value_stays_nan():
    """0.0 in its place would say that the token was certain."""
    values = sampled_logprobs([5, 6, 7, 8], table([[(5, -0.5)], [], [(1, -0.1)], [(8, None)]]))
    assert values[0] == np.float32(-0.5)
    assert all(math.isnan(value) for value in values[1:])
    assert np.isnan(sampled_logprobs([1, 2], None)).all()
    assert np.isnan(sampled_logprobs([5, 6], table([[(5, -0.5)]]))).tolist() == [False, True]
