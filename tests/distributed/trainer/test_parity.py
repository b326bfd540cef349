"""Megatron's log-probs are those of the same weights in transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.trainer.batches import RAGGED, random_batch
from tests.support.trainer.definition import batch_logprobs
from tests.support.trainer.probes import logprobs, train_and_export
from tests.support.trainer.ranks import Ranks, settings_for

FAMILIES = ["qwen2-tied", "qwen2-untied", "qwen3", "qwen3-moe", "llama3", "mistral"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_transformers(ranks: Ranks, models: Path, family: str) -> None:
    """Packing, rotary positions, biases, norms and head sizes of each family."""
    batch = random_batch(RAGGED)
    found = ranks.run(1, logprobs, settings_for(str(models / family)), batch)[0]
    expected = batch_logprobs(models / family, batch, torch.float32)
    assert (np.isfinite(found) == np.isfinite(expected)).all()
    assert np.nanmax(np.abs(found - expected)) < 1e-5


def test_exported_weights_after_training_equal_transformers(
    ranks: Ranks, models: Path, tmp_path: Path
) -> None:
    batch = random_batch(RAGGED, num_mini_batches=2)
    settings = settings_for(str(models / "qwen2-tied"), tensor=2, pipeline=2, sequence=True)
    folder = tmp_path / "exported"
    parts = ranks.run(4, train_and_export, settings, batch, folder)
    (found,) = [part for part in parts if part is not None]
    expected = batch_logprobs(folder, batch, torch.float32)
    assert np.nanmax(np.abs(found - expected)) < 1e-5
    before = batch_logprobs(models / "qwen2-tied", batch, torch.float32)
    assert np.nanmax(np.abs(found - before)) > 1e-3, "the export must hold the trained weights"


def test_temperature_divides_the_logits(ranks: Ranks, models: Path) -> None:
    batch = random_batch([20, 31])
    settings = settings_for(str(models / "qwen2-tied"), temperature=0.5)
    warm = ranks.run(1, logprobs, settings_for(str(models / "qwen2-tied")), batch)[0]
    cold = ranks.run(1, logprobs, settings, batch)[0]
    assert np.nanmax(np.abs(warm - cold)) > 0.1
