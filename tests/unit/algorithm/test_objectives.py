"""Every rule against numbers worked out apart from this code, to nine digits, in fp64.

Kernels are tested against the definition; a formula that is wrong there would hide itself.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megadapo.algorithm.objective import PolicyObjective
from megadapo.algorithm.reference import policy_loss, token_losses

F64 = torch.float64
# two sequences, of three and two tokens
OLD = torch.tensor([-0.5, -2.0, -1.0, -0.7, -1.5], dtype=F64)
NEW = torch.tensor([-0.4, -1.6, -1.3, -1.1, -0.3], dtype=F64)
REF = torch.tensor([-0.6, -1.5, -1.4, -0.9, -0.9], dtype=F64)
ADVANTAGES = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0], dtype=F64)
CU_SEQLENS = torch.tensor([0, 3, 5])
LENGTHS = torch.tensor([3.0, 3.0, 3.0, 2.0, 2.0], dtype=F64)
WEIGHTS = {
    "token-sum": torch.ones(5, dtype=F64),
    "token-mean": torch.full((5,), 0.2, dtype=F64),
    "seq-mean-token-mean": 0.5 / LENGTHS,
    "seq-mean-token-sum": torch.full((5,), 0.5, dtype=F64),
    "seq-sum-token-mean": 1.0 / LENGTHS,
    "seq-mean-token-sum-norm": torch.full((5,), 0.5 / 4, dtype=F64),
}

RATIOS = [1.105170918, 1.491824698, 0.740818221, 0.670320046, 3.320116923]


def token_values(objective: PolicyObjective, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return l_t and its derivative for each of the five tokens."""
    logprobs = NEW.clone().requires_grad_()
    losses = token_losses(logprobs, OLD, ADVANTAGES, objective=objective, **inputs)
    losses.sum().backward()
    return losses.detach(), logprobs.grad


def weighted(
    objective: PolicyObjective, aggregation: str, **inputs: Tensor
) -> tuple[float, Tensor]:
    """Return the loss and its derivative in each log-prob."""
    logprobs = NEW.clone().requires_grad_()
    loss = policy_loss(
        logprobs, OLD, ADVANTAGES, WEIGHTS[aggregation], CU_SEQLENS, objective=objective, **inputs
    )
    loss.backward()
    return loss.item(), logprobs.grad


def near(expected: list[float]) -> object:
    return pytest.approx(expected, abs=3e-9)


CISPO = [-1.105170918, -1.491824698, -0.740818221, 0.670320046, 3.320116923]
TOKENS = {
    "dapo": (
        PolicyObjective(),
        [-1.105170918, -1.28, -0.740818221, 0.8, 3.320116923],
        [-1.105170918, 0.0, -0.740818221, 0.0, 3.320116923],
    ),
    "ppo": (
        PolicyObjective(clip_high=0.2),
        [-1.105170918, -1.2, -0.740818221, 0.8, 3.320116923],
        [-1.105170918, 0.0, -0.740818221, 0.0, 3.320116923],
    ),
    "dual-clip": (
        PolicyObjective(dual_clip=3.0),
        [-1.105170918, -1.28, -0.740818221, 0.8, 3.0],
        [-1.105170918, 0.0, -0.740818221, 0.0, 0.0],
    ),
    "cispo-5": (
        PolicyObjective(gate="weight", weight_max=5.0),
        [g * x for g, x in zip(CISPO, NEW.tolist(), strict=True)],
        CISPO,
    ),
    "cispo-1.28": (
        PolicyObjective(gate="weight", weight_max=1.28),
        [-1.105170918 * -0.4, -1.28 * -1.6, -0.740818221 * -1.3, 0.670320046 * -1.1, 1.28 * -0.3],
        [-1.105170918, -1.28, -0.740818221, 0.670320046, 1.28],
    ),
    "sapo": (
        PolicyObjective(gate="soft"),
        [-2.105074085, -2.482144761, -1.742259422, 1.578335089, 3.503012171],
        [-1.102120491, -1.405125974, -0.728515044, 0.650633367, 0.982563443],
    ),
    "reinforce": (
        PolicyObjective(ratio="none", gate="none"),
        [0.4, 1.6, 1.3, -1.1, -0.3],
        [-1.0, -1.0, -1.0, 1.0, 1.0],
    ),
    "no-gate": (
        PolicyObjective(gate="none"),
        [-a * r for a, r in zip(ADVANTAGES.tolist(), RATIOS, strict=True)],
        [-a * r for a, r in zip(ADVANTAGES.tolist(), RATIOS, strict=True)],
    ),
    # |p - p_old| = 0.064, 0.067, 0.095, 0.164, 0.518
    "ipo": (
        PolicyObjective(gate="ipo", mask_low=0.15, mask_high=0.15),
        [-1.105170918, -1.491824698, -0.740818221, 0.0, 0.0],
        [-1.105170918, -1.491824698, -0.740818221, 0.0, 0.0],
    ),
    "dppo": (
        PolicyObjective(gate="dppo", mask_low=0.15, mask_high=0.065),
        [-1.105170918, 0.0, -0.740818221, 0.0, 3.320116923],
        [-1.105170918, 0.0, -0.740818221, 0.0, 3.320116923],
    ),
}


@pytest.mark.parametrize("rule", list(TOKENS))
def test_value_and_derivative_of_each_token(rule: str) -> None:
    objective, values, slopes = TOKENS[rule]
    losses, gradient = token_values(objective)
    assert losses.tolist() == near(values)
    assert gradient.tolist() == near(slopes)


@pytest.mark.parametrize(
    ("rule", "aggregation", "loss"),
    [
        ("dapo", "token-sum", 0.994127784),
        ("dapo", "token-mean", 0.198825557),
        ("dapo", "seq-mean-token-mean", 0.509031041),
        ("dapo", "seq-mean-token-sum", 0.497063892),
        ("dapo", "seq-sum-token-mean", 1.018062082),
        ("dapo", "seq-mean-token-sum-norm", 0.124265973),
        ("ppo", "token-mean", 0.214825557),
        ("dual-clip", "token-mean", 0.134802172),
        ("cispo-5", "token-mean", 0.411732889),
        ("cispo-1.28", "token-mean", 0.466356001),
        ("sapo", "seq-mean-token-mean", 0.215423770),
    ],
)
def test_losses(rule: str, aggregation: str, loss: float) -> None:
    assert weighted(TOKENS[rule][0], aggregation)[0] == near(loss)


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


@pytest.mark.parametrize("gradient", list(KL))
@pytest.mark.parametrize("value", list(KL))
def test_kl_value_and_gradient_estimators_are_independent(value: str, gradient: str) -> None:
    """The policy term is subtracted; the coefficient must not change it."""
    objective = PolicyObjective(kl_coef=0.5, kl_value=value, kl_gradient=gradient)
    losses, slopes = token_values(objective, logprobs_ref=REF)
    plain, plain_slopes = token_values(PolicyObjective())
    assert ((losses - plain) / 0.5).tolist() == near(KL[value][0])
    assert ((slopes - plain_slopes) / 0.5).tolist() == near(KL[gradient][1])


def test_kl_in_reward_is_not_in_loss() -> None:
    objective = PolicyObjective(kl_coef=0.5, kl_in="reward", kl_value="k1")
    assert weighted(objective, "token-mean")[0] == near(0.198825557)


def test_grpo_with_its_kl_divergence() -> None:
    loss, gradient = weighted(
        PolicyObjective(clip_high=0.2, kl_coef=0.04), "seq-mean-token-mean", logprobs_ref=REF
    )
    assert loss == near(0.524258112)
    expected = [-0.182986691, -0.000701139, -0.122835286, -0.002214028, 0.834541114]
    assert gradient.tolist() == near(expected)


@pytest.mark.parametrize(
    ("weights", "loss", "first"),
    [
        ([2.0, 1.0, 1.0, 1.0, 0.740818221], -0.194311389, -0.442068367),
        ([0.0, 1.0, 1.0, 1.0, 0.740818221], 0.247756978, 0.0),
        ([2.459603111, 1.0, 1.0, 1.0, 0.740818221], -0.295899388, -0.543656366),
    ],
    ids=["truncated", "masked", "banded"],
)
def test_importance_weights(weights: list[float], loss: float, first: float) -> None:
    """They multiply value and gradient, and are constants."""
    found, gradient = weighted(
        PolicyObjective(), "token-mean", importance_weights=torch.tensor(weights, dtype=F64)
    )
    assert found == near(loss)
    assert gradient.tolist() == near([first, 0.0, -0.148163644, 0.0, 0.491920622])


GSPO = PolicyObjective(ratio="sequence", clip_low=3e-4, clip_high=4e-4)
E_LOG_RATIOS = torch.tensor([1.0e-3, -4e-4, 3e-4, -2e-3, 2e-4, 3e-3, -1e-3], dtype=F64)
E_EDGES = torch.tensor([0, 3, 5, 7])


def test_gspo() -> None:
    """Equation 5: one ratio a sequence, the second sequence clipped."""
    logprobs = E_LOG_RATIOS.clone().requires_grad_()
    advantages = torch.tensor([1.0, 1, 1, -1, -1, -1, -1], dtype=F64)
    weights = torch.tensor([1 / 9] * 3 + [1 / 6] * 4, dtype=F64)
    loss = policy_loss(
        logprobs, torch.zeros(7, dtype=F64), advantages, weights, E_EDGES, objective=GSPO
    )
    loss.backward()
    assert loss.item() == pytest.approx(0.333466818387, abs=1e-11)
    expected = [-0.111144449445] * 3 + [0.0] * 2 + [0.166833416694] * 2
    assert logprobs.grad.tolist() == pytest.approx(expected, abs=1e-11)


def test_gspo_token() -> None:
    """Equation 13, on the first sequence alone."""
    logprobs = E_LOG_RATIOS[:3].clone().requires_grad_()
    loss = policy_loss(
        logprobs,
        torch.zeros(3, dtype=F64),
        torch.tensor([1.0, 0.5, -0.25], dtype=F64),
        torch.full((3,), 1 / 3, dtype=F64),
        E_EDGES[:2],
        objective=GSPO,
    )
    loss.backward()
    assert loss.item() == near((-1.000300045 - 0.500150023 + 0.250075011) / 3)
    assert logprobs.grad.tolist() == near([-0.333433348, -0.166716674, 0.083358337])


def test_tokens_without_weight_do_not_enter_sequence_ratio() -> None:
    """A masked tool's token, or one without an old log-prob, must not move the others' ratio."""
    logprobs, old = E_LOG_RATIOS.clone(), torch.zeros(7, dtype=F64)
    weights = torch.full((7,), 0.1, dtype=F64)
    weights[1], old[4] = 0.0, float("nan")
    logprobs.requires_grad_()
    policy_loss(
        logprobs,
        old,
        torch.ones(7, dtype=F64),
        weights,
        E_EDGES,
        objective=PolicyObjective(ratio="sequence", gate="none"),
    ).backward()
    means = torch.tensor([6.5e-4, 0.0, 6.5e-4, -2e-3, 0.0, 1e-3, 1e-3], dtype=F64)
    expected = -0.1 * means.exp()
    expected[[1, 4]] = 0.0
    assert logprobs.grad.tolist() == pytest.approx(expected.tolist(), abs=1e-11)


def test_masked_and_empty_sequences() -> None:
    """Neither a division by zero nor a gradient."""
    logprobs = E_LOG_RATIOS.clone().requires_grad_()
    weights = torch.tensor([0.0] * 3 + [0.1] * 4, dtype=F64)
    edges = torch.tensor([0, 0, 3, 7, 7])
    loss = policy_loss(
        logprobs,
        torch.zeros(7, dtype=F64),
        torch.ones(7, dtype=F64),
        weights,
        edges,
        objective=GSPO,
    )
    loss.backward()
    assert loss.isfinite() and not logprobs.grad[:3].any() and logprobs.grad[3:].all()
