"""Megatron's log-probs are those of the same weights in transformers."""

import numpy as np
import pytest
import torch

from tests.support.trainer.batches import RAGGED, random_batch
from tests.support.trainer.definition import batch_logprobs
from tests.support.trainer.probes import logprobs, train_and_export

FAMILIES = ["qwen2-tied", "qwen2-untied", "qwen3", "qwen3-moe", "llama3", "mistral"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_transformers(ranks, models, family):
    """Packing, rotary positions, biases, norms and head sizes of each family."""
    batch = random_batch(RAGGED)
    (found,) = ranks.on(family, logprobs, batch)
    expected = batch_logprobs(models / family, batch, torch.float32)
    assert (np.isfinite(found) == np.isfinite(expected)).all()
    assert np.nanmax(np.abs(found - expected)) < 1e-5


def test_exported_weights_after_training_equal_transformers(ranks, models, tmp_path):
    batch = random_batch(RAGGED, num_mini_batches=2)
    folder, split = tmp_path / "exported", {"tensor": 2, "pipeline": 2, "sequence": True}
    parts = ranks.on("qwen2-tied", train_and_export, batch, folder, **split)
    (found,) = [part for part in parts if part is not None]
    expected = batch_logprobs(folder, batch, torch.float32)
    assert np.nanmax(np.abs(found - expected)) < 1e-5
    before = batch_logprobs(models / "qwen2-tied", batch, torch.float32)
    assert np.nanmax(np.abs(found - before)) > 1e-3, "the export must hold the trained weights"
