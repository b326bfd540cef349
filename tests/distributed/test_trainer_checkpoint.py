"""A checkpoint continues the same training at another split, moments included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from batches import RAGGED, random_batch
from probes import train
from ranks import Ranks, settings_for

TP2 = {"tensor": 2}
PP2 = {"pipeline": 2}
DP2_TP2 = {"tensor": 2, "data": 2, "sequence": True}


@pytest.fixture(scope="module")
def checkpoint(ranks: Ranks, models: Path, tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    """Three steps at TP 2, saved; and the weights a fourth step would give."""
    folder = tmp_path_factory.mktemp("checkpoint")
    settings = settings_for(str(models / "qwen2-tied"), **TP2)
    batch = random_batch(RAGGED, num_mini_batches=2)
    ranks.run(2, _train_and_save, settings, batch, folder)
    _, expected = ranks.run(2, train, settings, batch, 4)[0]
    return folder, expected


def _train_and_save(rendezvous, settings, batch, folder):
    return train(rendezvous, settings, batch, 3, save=folder)


def _load_and_train(rendezvous, settings, batch, folder):
    return train(rendezvous, settings, batch, 1, load=folder, first_step=4)


@pytest.mark.parametrize("layout", [TP2, PP2, DP2_TP2], ids=["tp2", "pp2", "dp2-tp2-sp"])
def test_loading_at_another_split_continues_the_training(
    ranks: Ranks, models: Path, checkpoint: tuple[Path, dict[str, np.ndarray]], layout: dict
) -> None:
    folder, expected = checkpoint
    settings = settings_for(str(models / "qwen2-tied"), **layout)
    batch = random_batch(RAGGED, num_mini_batches=2)
    _, found = ranks.run(settings.trainer.num_ranks, _load_and_train, settings, batch, folder)[0]
    for name, weight in expected.items():
        if layout is TP2:
            assert found[name].tobytes() == weight.tobytes(), name
        np.testing.assert_allclose(found[name], weight, rtol=0, atol=2e-6, err_msg=name)
