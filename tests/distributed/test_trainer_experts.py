"""Models with experts: the split does not matter either, and the gradients are the definition's.

Catches tokens that reach another expert than their own, gradients of experts that are added up
over too many or too few ranks, and a gradient norm that counts an expert twice or never.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.test_trainer_layouts import (
    OVERLAP,
    assert_close_by_block,
    assert_same,
    measure,
)
from tests.support.batches import RAGGED, random_batch
from tests.support.probes import Gradients
from tests.support.ranks import Ranks

LAYOUTS = {
    "tp1-small-budget": {"tokens_per_micro_batch": 64},
    "dp2": {"data": 2},
    "ep2": {"data": 2, "expert": 2},
    "ep4-overlap": {"data": 4, "expert": 4, **OVERLAP},
    "tp2": {"tensor": 2, "sequence": True},
    "tp2-etp2": {"tensor": 2, "sequence": True, "expert_tensor": 2},
    "tp2-ep2": {"tensor": 2, "sequence": True, "expert": 2},
    "tp2-dp2-ep2": {"tensor": 2, "sequence": True, "data": 2, "expert": 2},
    "tp2-dp2-ep4": {"tensor": 2, "sequence": True, "data": 2, "expert": 4},
    "pp2-ep2": {"pipeline": 2, "data": 2, "expert": 2},
    "tp2-vpp2-ep2": {"tensor": 2, "sequence": True, "pipeline": 2, "virtual": 2, "expert": 2},
    "ep2-recompute": {"data": 2, "expert": 2, "recompute": "full"},
    "ep2-recompute-parts": {"data": 2, "expert": 2, "recompute": "selective"},
}


@pytest.fixture(scope="module")
def reference(ranks: Ranks, models: Path) -> Gradients:
    """One rank, one micro-batch."""
    return measure(
        ranks, models / "qwen3-moe", random_batch(RAGGED), tokens_per_micro_batch=100_000
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_neither_loss_nor_gradient(
    ranks: Ranks, models: Path, reference: Gradients, layout: str
) -> None:
    found = measure(ranks, models / "qwen3-moe", random_batch(RAGGED), **LAYOUTS[layout])
    assert_same(found, reference)


def test_gradients_are_those_of_the_definition(models: Path, reference: Gradients) -> None:
    from tests.support.definition import loss_and_gradients

    loss, by_name = loss_and_gradients(models / "qwen3-moe", random_batch(RAGGED))
    assert reference.loss == pytest.approx(loss, rel=1e-5)
    assert_close_by_block(reference.by_name, by_name, 1e-5)
