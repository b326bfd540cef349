"""The Bradley-Terry loss against torch in fp64, also where a sigmoid is 0 or 1."""

import numpy as np
import torch
from torch.nn import functional

from megadapo.algorithm.preferences import pair_losses, pair_statistics


def test_losses_and_slopes_equal_torch_in_fp64():
    differences = np.array([-1000.0, -40.0, -3.7, -1e-9, 0.0, 0.25, 5.0, 40.0, 1000.0])
    rejected = np.linspace(-2.0, 2.0, len(differences))
    losses, slopes = pair_losses(rejected + differences, rejected)
    difference = torch.tensor(rejected + differences - rejected).requires_grad_()
    expected = -functional.logsigmoid(difference)
    expected.sum().backward()
    np.testing.assert_allclose(losses, expected.detach().numpy(), rtol=1e-12, atol=1e-300)
    np.testing.assert_allclose(slopes, difference.grad.numpy(), rtol=1e-12, atol=1e-300)


def test_ties_are_half_in_order():
    """A reward model that gives every response one score knows nothing."""
    assert pair_statistics(np.zeros(8))["accuracy"] == 0.5
    found = pair_statistics(np.array([1.0, 0.0, 2.0, 3.0]))
    assert (found["accuracy"], found["margin"]) == (0.5, 0.0)
