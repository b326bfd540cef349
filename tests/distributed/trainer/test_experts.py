"""Models with experts: gradients and balance loss of every split are the definition's."""

from pathlib import Path

import pytest

from tests.support.trainer.batches import RAGGED, random_batch
from tests.support.trainer.gradients import assert_close_by_block, assert_same, measure
from tests.support.trainer.probes import Gradients, build, update
from tests.support.trainer.ranks import Ranks, layout, with_marks

LAYOUTS = ("tp2-sp-cp2-ep4", "pp2-dp2-ep2")
SLOW = ("tp2-sp-etp2", "dp2-ep2-recompute")
FURTHER = (
    *("small", "dp2", "dp2-ep2", "tp2-sp", "cp2-ep2", "dp4-ep4-overlap", "tp2-sp-dp2-ep2"),
    *("tp2-sp-vpp2-ep2", "dp2-ep2-mlp", "tp2-sp-ep2"),
)
AUX_LOSS = 5.0
"""So much that most of a gradient is of the load-balancing loss."""
BALANCED = with_marks(("tp2-sp-cp2-ep4", "tp2-sp-pp2-recompute"), full=("small", "cp2-dp2-ep2"))


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> dict[float, Gradients]:
    """One rank, one micro-batch; by the coefficient of the load-balancing loss."""
    return {
        coef: measure(
            ranks, "qwen3-moe", random_batch(RAGGED), tokens_per_micro_batch=100_000, aux_loss=coef
        )
        for coef in (0.0, AUX_LOSS)
    }


@pytest.mark.parametrize("name", with_marks(LAYOUTS, slow=SLOW, full=FURTHER))
def test_layout_keeps_loss_and_gradient(ranks, reference, name):
    found = measure(ranks, "qwen3-moe", random_batch(RAGGED), **layout(name))
    assert_same(found, reference[0.0])
    assert found.experts == pytest.approx(reference[0.0].experts, rel=1e-6)


@pytest.mark.parametrize("name", BALANCED)
def test_layout_does_not_change_the_load_balancing_loss(ranks, reference, name):
    batch = random_batch(RAGGED)
    found = measure(ranks, "qwen3-moe", batch, aux_loss=AUX_LOSS, **layout(name))
    assert_same(found, reference[AUX_LOSS])
    assert found.loss == pytest.approx(reference[0.0].loss, rel=1e-6), "it is in the gradient alone"
    assert found.grad_norm > 2 * reference[0.0].grad_norm


@pytest.mark.parametrize("coef", [0.0, AUX_LOSS])
def test_gradients_equal_the_definition(models, reference, coef):
    from tests.support.trainer.definition import balance_loss, loss_and_gradients

    found, batch = reference[coef], random_batch(RAGGED)
    loss, by_name = loss_and_gradients(models / "qwen3-moe", batch)
    balance, max_load, of_balance = balance_loss(models / "qwen3-moe", batch)
    expected = {
        name: gradient + coef * of_balance.get(name, 0.0) for name, gradient in by_name.items()
    }
    assert found.loss == pytest.approx(loss, rel=1e-5)
    expected_balance = {"experts/balance_loss": balance, "experts/max_load": max_load}
    assert found.experts == pytest.approx(expected_balance, rel=1e-5)
    assert_close_by_block(found.by_name, expected, 1e-5)


def _threads_after_an_update(rendezvous, settings, batch) -> int:
    update(build(rendezvous, settings), batch, policy_version=0, step=1)
    return len(list(Path("/proc/self/task").iterdir()))


def test_ended_trainer_leaves_no_threads(ranks):
    """Catches experts whose last micro-batch's graph keeps the model and its process groups."""
    first, *later = (
        ranks.on("qwen3-moe", _threads_after_an_update, random_batch(RAGGED), expert=2, data=2)[0]
        for _ in range(3)
    )
    assert max(later) <= first
