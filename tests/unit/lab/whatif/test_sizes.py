"""Sizes of tokens' gradients: shares by probability, sign, length and position."""

from itertools import pairwise

import numpy as np
import pytest

from megadapo.lab.whatif.sizes import gradient_sizes, sizes_table
from tests.support.trainer.batches import random_batch


def test_shares_are_of_the_gradient_and_not_of_the_tokens():
    batch = random_batch([9, 4, 12, 30])
    rng = np.random.default_rng(0)
    d_policy = np.where(batch.is_trained, rng.normal(size=len(batch.tokens)), np.nan)
    d_policy = d_policy.astype(np.float32)
    distance = rng.uniform(0.0, 1.4, len(batch.tokens)).astype(np.float32)
    logprobs = np.log(rng.uniform(0.01, 1.0, len(batch.tokens))).astype(np.float32)
    found = gradient_sizes(d_policy, distance, logprobs, batch)
    # token by token
    totals = dict.fromkeys(("all", "rare", "likely", "positive", "longest", "last"), 0.0)
    lengths = np.diff(batch.cu_seqlens) - batch.prompt_lengths
    for sequence, (start, stop) in enumerate(pairwise(batch.cu_seqlens)):
        first = start + batch.prompt_lengths[sequence]
        for token in range(first, stop):
            size = 0.0 if np.isnan(d_policy[token]) else abs(d_policy[token]) * distance[token]
            p = np.exp(logprobs[token])
            totals["all"] += size
            totals["rare"] += size * (p < 0.2)
            totals["likely"] += size * (p > 0.9)
            totals["positive"] += size * (batch.advantages[token] > 0)
            totals["longest"] += size * (lengths[sequence] >= np.quantile(lengths, 0.75))
            totals["last"] += size * (token - first >= 0.75 * lengths[sequence])
    for name in totals.keys() - {"all"}:
        assert getattr(found, name) == pytest.approx(totals[name] / totals["all"], rel=1e-5), name
    assert found.median is not None and found.largest is not None and found.p99 is not None
    assert found.median < found.p99 <= found.largest
    assert "p < 0.2" in sizes_table([("own", found)])


def test_a_batch_without_any_gradient_has_no_sizes():
    batch = random_batch([5, 3])
    nothing = np.zeros(len(batch.tokens), dtype=np.float32)
    found = gradient_sizes(nothing, nothing, nothing, batch)
    assert set(vars(found).values()) == {None}
    assert "null" not in sizes_table([("own", found)])
