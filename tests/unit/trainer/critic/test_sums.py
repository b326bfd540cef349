"""The critic's statistics are those of all tokens together, however they were added up."""

import numpy as np
import pytest
import torch

from megadapo.trainer.critic.critic import CriticSums, summarize_critic


def _sums(values: np.ndarray, returns: np.ndarray, **others: float) -> CriticSums:
    sums = CriticSums(**others)
    sums.add(torch.from_numpy(values), torch.from_numpy(returns))
    return sums


def test_statistics_of_parts_equal_the_whole():
    rng = np.random.default_rng(0)
    returns = rng.normal(0.4, 1.0, 60)
    values = 0.5 * returns + rng.normal(0.0, 0.3, 60)
    cuts = [slice(0, 1), slice(1, 45), slice(45, 60)]
    parts = [_sums(values[cut], returns[cut], loss=0.3, clipped=2.0) for cut in cuts]
    result = summarize_critic(parts, grad_norms=[1.0, 2.0], lr=0.1)
    assert result["critic/explained_variance"] == pytest.approx(
        1 - np.var(returns - values) / np.var(returns), rel=1e-12
    )
    assert result["critic/value_mean"] == pytest.approx(values.mean())
    assert result["critic/return_mean"] == pytest.approx(returns.mean())
    assert result["critic/loss"] == pytest.approx(0.3)
    assert result["critic/clip_fraction"] == pytest.approx(0.1)
    assert (result["critic/grad_norm"], result["critic/skipped_updates"]) == (1.5, 1)


def test_equal_returns_have_no_explained_variance():
    """Rounding over rounding would be a share of any size."""
    parts = [_sums(np.linspace(-1, 1, 7), np.full(7, 0.1))] * 3
    assert summarize_critic(parts, grad_norms=[], lr=0.1)["critic/explained_variance"] is None
    assert summarize_critic([CriticSums()], grad_norms=[], lr=0.1) == {"critic/lr": 0.1}
