"""Comparisons of loss and gradients between layouts."""

from typing import Any

import numpy as np
import pytest

from megadapo.data.batch import PackedBatch
from tests.support.trainer.probes import Gradients, gradients_by_case
from tests.support.trainer.ranks import Ranks


def measure(ranks: Ranks, model: str, batch: PackedBatch, **layout: Any) -> Gradients:
    """Return rank 0's loss and gradients of the first mini-batch under a layout."""
    return ranks.on(model, gradients_by_case, batch, None, **layout)[0][""]


def assert_same(found: Gradients, expected: Gradients) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)
    assert found.sizes == pytest.approx(expected.sizes, rel=1e-6)
    assert_close_by_block(found.by_name, expected.by_name, 1e-6)


def assert_close_by_block(found: dict, expected: dict, tolerance: float) -> None:
    errors = errors_by_block(found, expected)
    assert {block: error for block, error in errors.items() if error > tolerance} == {}


def errors_by_block(found: dict, expected: dict) -> dict[str, float]:
    """Compare the gradients of each decoder layer, the embedding, the final norm and the head.

    Errors are relative to the layer: a key bias's gradient is a difference of near equal terms.
    """
    assert found.keys() == expected.keys()
    squares: dict[str, list[float]] = {}
    for name, gradient in expected.items():
        block = ".".join(name.split(".")[:3])
        error = found[name].astype(np.float64) - gradient
        sums = squares.setdefault(block, [0.0, 0.0])
        sums[0] += float((error**2).sum())
        sums[1] += float((gradient.astype(np.float64) ** 2).sum())
        assert sums[1] > 0.0, f"{name} gets no gradient, so nothing is compared"
    return {block: (error / size) ** 0.5 for block, (error, size) in squares.items()}
