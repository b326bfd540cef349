"""Rules against numbers worked out apart from this code, to nine digits, in fp64.

Rules that TRL or verl have too are in test_public_losses.py.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megadapo.algorithm.objective import PolicyObjective
from megadapo.algorithm.preferences import pair_losses, pair_statistics
from megadapo.algorithm.reference import policy_loss, token_losses

F64 = torch.float64
# two sequences, of three and two tokens
OLD = torch.tensor([-0.5, -2.0, -1.0, -0.7, -1.5], dtype=F64)
NEW = torch.tensor([-0.4, -1.6, -1.3, -1.1, -0.3], dtype=F64)
REF = torch.tensor([-0.6, -1.5, -1.4, -0.9, -0.9], dtype=F64)
ADVANTAGES = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0], dtype=F64)
RATIOS = [1.105170918, 1.491824698, 0.740818221, 0.670320046, 3.320116923]
POLICY_GRADIENT = [-a * r for a, r in zip(ADVANTAGES.tolist(), RATIOS, strict=True)]
TOKENS = {
    "reinforce": (
        PolicyObjective(ratio="none", gate="none"),
        [0.4, 1.6, 1.3, -1.1, -0.3],
        [-1.0, -1.0, -1.0, 1.0, 1.0],
    ),
    "no-gate": (PolicyObjective(gate="none"), POLICY_GRADIENT, POLICY_GRADIENT),
}
KL = {
    "k1": ([0.2, -0.1, 0.1, -0.2, 0.6], [1.0] * 5),
    "k2": ([0.02, 0.005, 0.005, 0.02, 0.18], [0.2, -0.1, 0.1, -0.2, 0.6]),
    "k3": (
        [0.018730753, 0.005170918, 0.004837418, 0.021402758, 0.148811636],
        [0.181269247, -0.105170918, 0.095162582, -0.221402758, 0.451188364],
    ),
    "corrected-k3": (
        [0.020700684, 0.007714104, 0.003583647, 0.014346698, 0.494072032],
        [0.221034184, -0.149182470, 0.074081822, -0.134064009, 1.992070154],
    ),
}
GSPO = PolicyObjective(ratio="sequence", clip_low=3e-4, clip_high=4e-4)
E_LOG_RATIOS = torch.tensor([1.0e-3, -4e-4, 3e-4, -2e-3, 2e-4, 3e-3, -1e-3], dtype=F64)


def token_values(objective: PolicyObjective, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return l_t and its derivative for each of the five tokens."""
    logprobs = NEW.clone().requires_grad_()
    losses = token_losses(logprobs, OLD, ADVANTAGES, objective=objective, **inputs)
    losses.sum().backward()
    return losses.detach(), logprobs.grad


def near(expected: float | list[float]) -> object:
    return pytest.approx(expected, abs=3e-9)


@pytest.mark.parametrize("rule", list(TOKENS))
def test_value_and_derivative_of_each_token(rule):
    objective, values, slopes = TOKENS[rule]
    losses, gradient = token_values(objective)
    assert losses.tolist() == near(values)
    assert gradient.tolist() == near(slopes)


@pytest.mark.parametrize("gradient", list(KL))
@pytest.mark.parametrize("value", list(KL))
def test_kl_value_and_gradient_estimators_are_independent(value, gradient):
    """The policy term is subtracted; the coefficient must not change it."""
    objective = PolicyObjective(kl_coef=0.5, kl_value=value, kl_gradient=gradient)
    losses, slopes = token_values(objective, logprobs_ref=REF)
    plain, plain_slopes = token_values(PolicyObjective())
    assert ((losses - plain) / 0.5).tolist() == near(KL[value][0])
    assert ((slopes - plain_slopes) / 0.5).tolist() == near(KL[gradient][1])


def test_kl_of_the_old_policy_by_hand():
    """r - 1 - log r and its derivative r - 1, beside the one to a reference; weighted if stale."""
    weights = torch.tensor([1.0, 1.0, 0.5, 1.0, 2.0], dtype=F64)
    objective = PolicyObjective(kl_coef=0.5)
    both = objective.model_copy(update={"old_kl_coef": 0.25})
    inputs = {"logprobs_ref": REF, "importance_weights": weights}
    losses, slopes = token_values(both, **inputs)
    plain, plain_slopes = token_values(objective, **inputs)
    # log-ratios 0.1, 0.4, -0.3, -0.4 and 1.2
    expected = [0.005170918, 0.091824698, 0.040818221 / 2, 0.070320046, 1.120116923 * 2]
    assert ((losses - plain) / 0.25).tolist() == near(expected)
    expected = [0.105170918, 0.491824698, -0.259181779 / 2, -0.329679954, 2.320116923 * 2]
    assert ((slopes - plain_slopes) / 0.25).tolist() == near(expected)


def test_mean_of_old_terms_is_the_divergence():
    """KL(old || policy) of two distributions over three tokens, as an exact mean under the old."""
    old, new = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2]], dtype=F64)
    objective = PolicyObjective(gate="none", old_kl_coef=1.0)
    zero = torch.zeros(3, dtype=F64)
    terms = token_losses(new.log(), old.log(), zero, objective=objective)
    expected = (old * (old / new).log()).sum()
    assert (old * terms).sum().item() == pytest.approx(expected.item(), rel=1e-12)


def test_kl_in_reward_is_not_in_loss():
    objective = PolicyObjective(kl_coef=0.5, kl_in="reward", kl_value="k1")
    assert torch.equal(token_values(objective)[0], token_values(PolicyObjective())[0])


def test_importance_weights_scale_value_and_gradient():
    weights = torch.tensor([0.0, 1.0, 2.459603111, 1.0, 0.740818221], dtype=F64)
    found = token_values(PolicyObjective(), importance_weights=weights)
    for one, plain in zip(found, token_values(PolicyObjective()), strict=True):
        assert one.tolist() == near((weights * plain).tolist())


def sequence_loss(
    advantages: list[float],
    weights: list[float],
    edges: list[int],
    objective: PolicyObjective = GSPO,
    old: list[float] | None = None,
) -> tuple[float, list[float]]:
    """Return loss and gradient of the first tokens of `E_LOG_RATIOS`."""
    logprobs = E_LOG_RATIOS[: edges[-1]].clone().requires_grad_()
    wide = (torch.tensor(x, dtype=F64) for x in (old or [0.0] * edges[-1], advantages, weights))
    loss = policy_loss(logprobs, *wide, torch.tensor(edges), objective=objective)
    loss.backward()
    return loss.item(), logprobs.grad.tolist()


def test_luspo():
    """Equation of arXiv 2602.05261: a sequence's clipped term times its length, over sequences."""
    advantages, edges, weights = [1.0] * 3 + [-1.0] * 4, [0, 3, 7], [1 / 2] * 7
    objective = PolicyObjective(ratio="sequence", clip_low=3e-4, clip_high=4e-4)
    found, gradient = sequence_loss(advantages, weights, edges, objective)
    logprobs = E_LOG_RATIOS.clone().requires_grad_()
    first, second = logprobs[:3].mean().exp(), logprobs[3:].mean().exp()
    low, high = 1 - 3e-4, 1 + 4e-4
    one = torch.minimum(first, first.clamp(low, high))
    two = torch.minimum(-second, -second.clamp(low, high))
    loss = -(3 * one + 4 * two) / 2
    loss.backward()
    assert found == near(loss.item()) and gradient == near(logprobs.grad.tolist())
    assert any(gradient)


def test_gspo():
    """Equation 5: one ratio a sequence, the second sequence clipped."""
    loss, gradient = sequence_loss([1.0] * 3 + [-1.0] * 4, [1 / 9] * 3 + [1 / 6] * 4, [0, 3, 5, 7])
    assert loss == pytest.approx(0.333466818387, abs=1e-11)
    expected = [-0.111144449445] * 3 + [0.0] * 2 + [0.166833416694] * 2
    assert gradient == pytest.approx(expected, abs=1e-11)


def test_gspo_token():
    """Equation 13, on the first sequence alone."""
    loss, gradient = sequence_loss([1.0, 0.5, -0.25], [1 / 3] * 3, [0, 3])
    assert loss == near((-1.000300045 - 0.500150023 + 0.250075011) / 3)
    assert gradient == near([-0.333433348, -0.166716674, 0.083358337])


def test_tokens_without_weight_do_not_enter_sequence_ratio():
    """A masked tool's token, or one without an old log-prob, must not move the others' ratio."""
    weights, old = [0.1] * 7, [0.0] * 7
    weights[1], old[4] = 0.0, float("nan")
    ungated = PolicyObjective(ratio="sequence", gate="none")
    _, gradient = sequence_loss([1.0] * 7, weights, [0, 3, 5, 7], ungated, old)
    means = torch.tensor([6.5e-4, 0.0, 6.5e-4, -2e-3, 0.0, 1e-3, 1e-3], dtype=F64)
    expected = -0.1 * means.exp()
    expected[[1, 4]] = 0.0
    assert gradient == pytest.approx(expected.tolist(), abs=1e-11)


def test_masked_and_empty_sequences():
    loss, gradient = sequence_loss([1.0] * 7, [0.0] * 3 + [0.1] * 4, [0, 0, 3, 7, 7])
    assert math.isfinite(loss) and not any(gradient[:3]) and all(gradient[3:])


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
