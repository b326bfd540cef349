"""Megatron's log-probs are those of the same weights in transformers."""

import numpy as np
import pytest
import torch

from tests.support.trainer.batches import RAGGED, random_batch
from tests.support.trainer.definition import batch_logprobs
from tests.support.trainer.probes import logprobs

FAMILIES = ["qwen2-tied", "qwen2-untied", "qwen3", "qwen3-moe", "llama3", "mistral"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_transformers(ranks, models, family):
    """Packing, rotary positions, biases, norms and head sizes of each family."""
    batch = random_batch(RAGGED)
    (found,) = ranks.on(family, logprobs, batch)
    expected = batch_logprobs(models / family, batch, torch.float32)
    assert (np.isfinite(found) == np.isfinite(expected)).all()
    assert np.nanmax(np.abs(found - expected)) < 1e-5
