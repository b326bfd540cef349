"""Sums and weights that travel beside the compute: the same bits, and never an old weight."""

import pytest

from tests.support.trainer.batches import RAGGED, random_batch
from tests.support.trainer.probes import traffic, train, train_and_export
from tests.support.trainer.ranks import OVERLAP, layout, with_marks

LAYOUTS = with_marks(("dp2-bf16", "vpp2-dp2"), full=("dp2", "pp2-dp2"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["deep-tied", pytest.param("deep-untied", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_overlap_changes_no_bit_of_weights_and_metrics(ranks, name, model):
    """Without clipping, whose norm is summed by bucket; an early read or sum shows in the loss."""
    batch = random_batch(RAGGED, num_mini_batches=3)
    plain = {"grad_clip": 0.0, **layout(name)}
    expected, expected_weights = ranks.on(model, train, batch, 2, **plain)[0]
    for results, weights in ranks.on(model, train, batch, 2, **plain, **OVERLAP):
        for step, truth in zip(results, expected, strict=True):
            assert step["policy/ratio_first_max_error"] == 0.0
            assert step["policy/grad_norm"] == pytest.approx(truth["policy/grad_norm"], rel=1e-6)
            assert step | {"policy/grad_norm": 0.0} == truth | {"policy/grad_norm": 0.0}
        for key, weight in expected_weights.items():
            assert weights[key].tobytes() == weight.tobytes(), key


def test_export_after_an_update_has_the_new_weights(ranks, tmp_path):
    """Other ranks' shares of the last update else arrive with the next forward pass."""
    batch = random_batch(RAGGED, num_mini_batches=2)
    files = []
    for name, overlap in (("plain", {}), ("overlapped", OVERLAP)):
        split = {"data": 2, "grad_clip": 0.0, **overlap}
        ranks.on("deep-untied", train_and_export, batch, tmp_path / name, **split)
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_traffic_overlaps_compute(ranks):
    """Options that changed nothing would pass all the other tests."""
    batch = random_batch(RAGGED)
    for started, num_buckets, waits in ranks.on("deep-untied", traffic, batch, data=2, **OVERLAP):
        assert started == num_buckets > 4
        assert waits
    for started, _, waits in ranks.on("deep-untied", traffic, batch, data=2):
        assert (started, waits) == (0, False)


def test_overlap_has_no_effect_with_one_replica(ranks):
    (found, _), (expected, _) = (
        ranks.on("qwen2-tied", train, random_batch(RAGGED), 2, **how)[0] for how in (OVERLAP, {})
    )
    assert found == expected
