"""Advantages of tokens and the clipped value loss, against plain loops and fp64 autograd."""

import numpy as np
import pytest
import torch

from megadapo.algorithm.gae import generalized_advantages, terminal_rewards, value_losses
from megadapo.algorithm.reference import generalized_advantages as definition

LENGTHS = [1, 7, 2, 1, 113, 30]


def test_published_gae_example():
    """V, KL divergences at 0.1 and a score of 1, worked out by hand."""
    values, rewards = np.array([0.2, 0.4, 0.6]), np.array([-0.005, 0.002, 0.99])
    one = np.zeros(3, dtype=np.int64)
    for discount, gae_lambda, expected in (
        (1.0, 0.95, [0.738875, 0.5725, 0.39]),
        (0.99, 0.95, [0.720308698, 0.562795, 0.39]),
        (1.0, 1.0, [0.787, 0.592, 0.39]),
    ):
        found = generalized_advantages(
            rewards, values, one, discount=discount, gae_lambda=gae_lambda
        )
        np.testing.assert_allclose(found, expected, atol=5e-10)


@pytest.mark.parametrize(("discount", "gae_lambda"), [(1, 1), (0.99, 0.95), (1, 0), (0.5, 0.25)])
def test_packed_gae_matches_plain_loops(discount, gae_lambda):
    rng = np.random.default_rng(0)
    sequences = np.repeat(np.arange(len(LENGTHS)) * 3, LENGTHS)
    rewards, values = rng.normal(size=len(sequences)), rng.normal(size=len(sequences))
    numbers = {"discount": discount, "gae_lambda": gae_lambda}
    found = generalized_advantages(rewards, values, sequences, **numbers)
    cu_seqlens = np.cumsum([0, *LENGTHS]).tolist()
    expected = definition(rewards.tolist(), values.tolist(), cu_seqlens, **numbers)
    np.testing.assert_allclose(found, expected, rtol=1e-14, atol=1e-14)


def test_no_tokens_at_all():
    """A rank's micro-batch may be padding alone."""
    nothing = np.empty(0)
    assert len(generalized_advantages(nothing, nothing, np.empty(0, dtype=np.int64))) == 0
    assert len(terminal_rewards(nothing, np.empty(0, dtype=np.int64))) == 0


def test_score_is_at_last_token():
    sequences = np.array([0, 0, 0, 4, 5, 5])
    scores = np.array([1.0, 1.0, 1.0, -1.0, 0.5, 0.5])
    assert terminal_rewards(scores, sequences).tolist() == [0, 0, 1.0, -1.0, 0, 0.5]


def _plain_loss(value: float, old: float, target: float, clip: float | None) -> tuple[float, float]:
    """Return loss and derivative of one value, case by case."""
    plain = (0.5 * (value - target) ** 2, value - target)
    if clip is None:
        return plain
    moved = min(max(value, old - clip), old + clip)
    if 0.5 * (moved - target) ** 2 <= plain[0]:
        return plain
    return 0.5 * (moved - target) ** 2, (moved - target) if moved == value else 0.0


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_matches_plain_cases(clip):
    """Values inside the band, at its edges, and beyond it on both sides."""
    offsets = [-0.5, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3, 5.0]
    cases = [(old + off, old, ret) for old in (0.0, 1.5) for off in offsets for ret in (-1.0, 2.0)]
    values, old, returns = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*cases, strict=True)
    )
    values.requires_grad_()
    losses, is_clipped = value_losses(values, old, returns, value_clip=clip)
    losses.sum().backward()
    expected = [_plain_loss(*case, clip) for case in cases]
    np.testing.assert_allclose(losses.detach().numpy(), [loss for loss, _ in expected], rtol=1e-14)
    assert values.grad is not None
    np.testing.assert_allclose(values.grad.numpy(), [slope for _, slope in expected], rtol=1e-14)
    assert bool(is_clipped.any()) == (clip is not None)
