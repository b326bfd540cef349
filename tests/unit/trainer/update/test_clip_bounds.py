"""The tokens of BAPO's search, and the weight of each."""

import math
from dataclasses import replace

import numpy as np
import torch

from megadapo.algorithm.bapo import BapoConfig, bapo_sums
from megadapo.trainer.batch.micro_batch import MicroBatch, MicroBatchBuilder, trained_tokens
from megadapo.trainer.update.step import sums_of
from tests.support.trainer.batches import random_batch

CONFIG = BapoConfig()


def _micro_batch() -> MicroBatch:
    batch = random_batch([9, 4, 12])
    predicted, _ = trained_tokens(batch)
    builder = MicroBatchBuilder(inverse_frequencies=None, token_multiple=1)
    return builder.build(batch, np.arange(3), predicted=predicted, policy_version=0)


def test_tokens_count_by_their_weights_in_the_loss():
    """A search over tokens that the update masks, or halves, finds bounds for another loss."""
    micro_batch = _micro_batch()
    rows = micro_batch.rows
    source = np.random.default_rng(3)
    old = torch.from_numpy(source.normal(-2.0, 0.3, micro_batch.num_tokens)).float()
    logprobs = old + torch.from_numpy(source.normal(0.0, 0.5, micro_batch.num_tokens)).float()
    weights = torch.ones_like(old)
    weights[rows[:4]] = torch.tensor([0.0, 0.5, 2.0, math.nan])
    micro_batch = replace(micro_batch, logprobs_old=old, importance_weights=weights)
    ratios = (logprobs - old).exp()[rows]
    advantages = (micro_batch.advantages * micro_batch.loss_weights)[rows]
    kept = [1, 2, *range(4, len(rows))]
    expected = bapo_sums(ratios[kept], (advantages * weights[rows])[kept], CONFIG)
    found = sums_of(micro_batch, logprobs, CONFIG)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
    plain = sums_of(replace(micro_batch, importance_weights=None), logprobs, CONFIG)
    torch.testing.assert_close(plain, bapo_sums(ratios, advantages, CONFIG), rtol=1e-12, atol=0.0)
