"""Sums and weights that travel beside the compute: the same bits, and never an old weight."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trainer.batches import RAGGED, random_batch
from tests.support.trainer.probes import traffic, train, train_and_export
from tests.support.trainer.ranks import Ranks, settings_for

OVERLAP = {"overlap": True, "bucket": 3000}
"""Buckets of about a matrix: several on the first stage, as a model of real size has."""
LAYOUTS = {
    "dp2": {"data": 2},
    "dp2-bf16": {"data": 2, "dtype": "bfloat16"},
    "pp2-dp2": {"pipeline": 2, "data": 2},
    "vpp2-dp2": {"pipeline": 2, "virtual": 2, "data": 2},
}


@pytest.mark.parametrize(
    "model", ["deep-tied", pytest.param("deep-untied", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_overlap_changes_no_bit_of_weights_and_metrics(
    ranks: Ranks, models: Path, layout: str, model: str
) -> None:
    """A pass that read a weight before it arrived, or a bucket that was summed before its last
    gradient, would show in the next loss. Without clipping, whose norm is summed by bucket."""
    batch = random_batch(RAGGED, num_mini_batches=3)
    folder = str(models / model)
    plain = settings_for(folder, grad_clip=0.0, **LAYOUTS[layout])
    overlapped = settings_for(folder, grad_clip=0.0, **LAYOUTS[layout], **OVERLAP)
    num_ranks = plain.trainer.num_ranks
    expected, expected_weights = ranks.run(num_ranks, train, plain, batch, 2)[0]
    for results, weights in ranks.run(num_ranks, train, overlapped, batch, 2):
        for step, truth in zip(results, expected, strict=True):
            assert step["policy/ratio_first_max_error"] == 0.0
            assert step["policy/grad_norm"] == pytest.approx(truth["policy/grad_norm"], rel=1e-6)
            assert step | {"policy/grad_norm": 0.0} == truth | {"policy/grad_norm": 0.0}
        for name, weight in expected_weights.items():
            assert weights[name].tobytes() == weight.tobytes(), name


def test_export_after_an_update_has_the_new_weights(
    ranks: Ranks, models: Path, tmp_path: Path
) -> None:
    """Other ranks' shares of the last update arrive with the next forward pass, if not asked for
    before."""
    batch = random_batch(RAGGED, num_mini_batches=2)
    files = []
    for name, overlap in (("plain", {}), ("overlapped", OVERLAP)):
        settings = settings_for(str(models / "deep-untied"), data=2, grad_clip=0.0, **overlap)
        ranks.run(2, train_and_export, settings, batch, tmp_path / name)
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_traffic_overlaps_compute(ranks: Ranks, models: Path) -> None:
    """Options that changed nothing would pass all the other tests."""
    folder, batch = str(models / "deep-untied"), random_batch(RAGGED)
    for started, num_buckets, waits in ranks.run(
        2, traffic, settings_for(folder, data=2, **OVERLAP), batch
    ):
        assert started == num_buckets > 4
        assert waits
    for started, _, waits in ranks.run(2, traffic, settings_for(folder, data=2), batch):
        assert (started, waits) == (0, False)


def test_overlap_has_no_effect_with_one_replica(ranks: Ranks, models: Path) -> None:
    batch = random_batch(RAGGED)
    folder = str(models / "qwen2-tied")
    expected, _ = ranks.run(1, train, settings_for(folder), batch, 2)[0]
    found, _ = ranks.run(1, train, settings_for(folder, **OVERLAP), batch, 2)[0]
    assert found == expected
