"""The reward model: its pairs' loss and gradient at every split, its checkpoints and its export."""

import numpy as np
import pytest

from megadapo.run.export.export import ExportSource, export_checkpoint
from megadapo.run.state.checkpoint import Checkpoint
from tests.support.trainer import critics, reward_models
from tests.support.trainer.gradients import assert_close_by_block
from tests.support.trainer.ranks import layouts

LAYOUTS = layouts("small", "dp2-overlap", "tp2", "pp2", "cp2-tp2-sp", "cp2-vpp2-small")
PAIRS = reward_models.random_pairs(
    [(5, 61), (33, 40), (3, 3), (90, 12), (7, 50)], [(19, 28), (20, 8)]
)
"""Two updates; a budget of 64 tokens separates the answers of most pairs."""
ORIGIN = {"tensor": 2, "sequence": True}


def _observe(ranks, **layout):
    return ranks.on("deep-tied", reward_models.observe, PAIRS, critic={}, **layout)[0]


@pytest.fixture(scope="module")
def alone(ranks):
    """One rank, one micro-batch an update."""
    return _observe(ranks, tokens_per_micro_batch=100_000)


@pytest.fixture(scope="module")
def expected(models):
    """The definition in fp64."""
    return reward_models.definition(models / "deep-tied", PAIRS)


def test_scores_loss_and_gradients_equal_the_definition(alone, expected):
    """A score of another token than the last, or a pair's sign or weight, would show."""
    np.testing.assert_allclose(alone["scores"], expected["scores"], rtol=0, atol=1e-5)
    assert alone["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert 0.0 < alone["accuracy"] < 1.0
    assert_close_by_block(alone["gradients"], expected["gradients"], 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_keeps_loss_and_gradient(ranks, alone, expected, layout):
    """A pair may be split over micro-batches and ranks, which must not change its loss."""
    found = _observe(ranks, **LAYOUTS[layout])
    np.testing.assert_allclose(found["scores"], alone["scores"], rtol=0, atol=2e-6)
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert found["norm"] == pytest.approx(alone["norm"], rel=1e-6)
    # the rounding of one rank alone would add to the split's
    assert_close_by_block(found["gradients"], expected["gradients"], 1e-6)


def test_training_orders_its_pairs(ranks):
    """The value head starts at 0, so the first update finds ties."""
    ((metrics, _),) = ranks.on("deep-tied", reward_models.train, PAIRS, range(1, 17), critic={})
    # log 2 of ties, and the second update
    assert metrics[0]["policy/loss"] > 0.5
    assert metrics[-1]["pairs/accuracy"] == 1.0
    assert metrics[-1]["policy/loss"] < 0.5 * metrics[0]["policy/loss"]
    assert metrics[-1]["policy/skipped_updates"] == 0


def test_saved_state_resumes_at_every_split_and_starts_a_critic(ranks, models, tmp_path):
    """Moments, weights and value head are all needed for the same next step."""
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path / "step-3" / "trainer"
    arguments = (PAIRS, range(1, 4), None, folder)
    ranks.on("deep-tied", reward_models.train, *arguments, critic={}, **ORIGIN)
    results = [
        ranks.on("deep-tied", reward_models.train, PAIRS, range(4, 5), folder, critic={}, **layout)
        for layout in (ORIGIN, {"context": 2, "pipeline": 2, "virtual": 2})
    ]
    (same, weights), (other, others) = results[0][0], results[1][0]
    assert other[0]["policy/loss"] == pytest.approx(same[0]["policy/loss"], rel=1e-5)
    for name, weight in weights.items():
        np.testing.assert_allclose(others[name], weight, rtol=0, atol=5e-6, err_msg=name)
    source, exported = ExportSource(Checkpoint(folder.parent, 3, {}), None), tmp_path / "model"
    export_checkpoint(source, exported, model=str(models / "deep-tied"))
    theirs = AutoModelForSequenceClassification.from_pretrained(exported).state_dict()
    ((_, _, ours),) = ranks.on(
        "deep-tied", critics.train, PAIRS, range(1, 1), critic={"path": str(exported)}
    )
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].numpy().tobytes() for name in ours)
    assert float(np.abs(ours["score.weight"]).max()) > 0.0
