"""The definition of the policy loss, which other tests trust, against numbers made by hand."""

import math

import pytest
import torch
from torch import Tensor

from megadapo.algorithm.objective import PolicyObjective
from megadapo.algorithm.reference import policy_loss, token_losses


def loss_and_grad(ratio: float, advantage: float, **objective: float | None) -> tuple[float, float]:
    """l_t and dl_t / dlogprob_t of one token with this ratio."""
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    losses = token_losses(logprobs, zero, zero + advantage, objective=PolicyObjective(**objective))
    losses.sum().backward()
    return losses.item(), logprobs.grad.item()


@pytest.mark.parametrize(
    "dual_clip, ratio, advantage, loss, grad",
    [
        (None, 1.0, 2.0, -2.0, -2.0),
        (None, 1.2, 2.0, -2.4, -2.4),
        (None, 1.3, 2.0, -2.56, 0.0),  # clipped at 1.28
        (None, 0.5, 2.0, -1.0, -1.0),  # below the window, and still too low for a good token
        (None, 0.7, -1.0, 0.8, 0.0),  # clipped at 0.8
        (None, 0.9, -1.0, 0.9, 0.9),
        (None, 5.0, -1.0, 5.0, 5.0),  # above the window, and still too high for a bad token
        (None, 1.1, 0.0, 0.0, 0.0),
        (3.0, 5.0, -1.0, 3.0, 0.0),
        (3.0, 2.0, -1.0, 2.0, 2.0),
        (3.0, 0.5, 1.0, -0.5, -0.5),
        (3.0, 0.5, 0.5, -0.25, -0.25),
        (3.0, 5.0, -2.0, 6.0, 0.0),  # the bound is on the ratio, not on the loss
        (3.0, 5.0, -0.5, 1.5, 0.0),
    ],
)
def test_decoupled_and_dual_clip(dual_clip, ratio, advantage, loss, grad):
    """Equation 8: the sign of the advantage decides which side is clipped."""
    found = loss_and_grad(ratio, advantage, dual_clip=dual_clip)
    assert found == pytest.approx((loss, grad), abs=1e-12)


@pytest.mark.parametrize(
    "log_ratio, clamped, advantage", [(25.0, 20.0, -1.0), (-25.0, -20.0, 1.0), (0.5, 0.5, -1.0)]
)
def test_ratio_is_clamped_on_both_sides(log_ratio, clamped, advantage):
    """Also a ratio of two log-probs that are not 0: their difference counts, nothing else."""
    logprobs = torch.tensor([-1.5], dtype=torch.float64, requires_grad=True)
    losses = token_losses(
        logprobs,
        logprobs.detach() - log_ratio,
        torch.tensor([advantage], dtype=torch.float64),
        objective=PolicyObjective(),
    )
    losses.sum().backward()
    loss = -math.exp(clamped) * advantage
    assert losses.item() == pytest.approx(loss, rel=1e-9, abs=0.0)
    assert logprobs.grad.item() == pytest.approx(loss if clamped == log_ratio else 0.0, rel=1e-9)


@pytest.mark.parametrize("gap, value", [(25.0, -20.0), (-25.0, 20.0)])
def test_kl_gap_is_clamped_on_both_sides(gap, value):
    """Unclamped, k3 of a token that the reference finds likely would overflow in fp32."""
    objective = PolicyObjective(kl_coef=1.0, kl_value="k1")
    logprobs = torch.tensor([-30.0], dtype=torch.float64)
    losses = token_losses(
        logprobs, logprobs, 0.0 * logprobs, objective=objective, logprobs_ref=logprobs + gap
    )
    assert losses.item() == value


def make_tokens(num_tokens: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal() -> Tensor:
        return torch.randn(num_tokens, generator=generator, dtype=torch.float64)

    return {
        "logprobs": -2.0 + 0.1 * normal(),
        "logprobs_old": -2.0 + 0.1 * normal(),
        "advantages": normal(),
        "loss_weights": torch.full((num_tokens,), 1.0 / num_tokens, dtype=torch.float64),
        "cu_seqlens": torch.tensor([0, 3, 3, num_tokens]),
    }


def test_loss_is_weighted_sum_in_input_dtype():
    tokens = make_tokens()
    losses = token_losses(
        tokens["logprobs"],
        tokens["logprobs_old"],
        tokens["advantages"],
        objective=PolicyObjective(),
    )
    got = policy_loss(**tokens, objective=PolicyObjective())
    assert got.dtype == torch.float64 and got.shape == ()
    assert got.item() == pytest.approx((tokens["loss_weights"] * losses).sum().item(), rel=1e-14)


def test_every_term_at_once():
    tokens, objective = make_tokens(), PolicyObjective(kl_coef=0.3, entropy_coef=0.1)
    plain = policy_loss(**tokens, objective=PolicyObjective())
    ref = tokens["logprobs"] - 0.5
    got = policy_loss(
        **tokens,
        objective=objective,
        logprobs_ref=ref,
        entropy=torch.full((7,), 2.0, dtype=torch.float64),
        importance_weights=torch.full((7,), 0.5, dtype=torch.float64),
    )
    expected = 0.5 * plain.item() + 0.3 * (math.exp(-0.5) - 0.5) - 0.1 * 2.0
    assert got.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["logprobs_old", "logprobs_ref", "importance_weights"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_tokens_that_do_not_enter(name, value):
    """Neither their value nor their gradient, even where it would be 0 x NaN."""
    tokens = make_tokens()
    tokens["logprobs_ref"] = tokens["logprobs"].clone()
    tokens["importance_weights"] = torch.ones(7, dtype=torch.float64)
    tokens["loss_weights"][5] = 0.0
    without = tokens | {"loss_weights": tokens["loss_weights"].clone()}
    without["loss_weights"][2] = 0.0
    expected = policy_loss(**without, objective=PolicyObjective())
    for bad in (2, 5):
        tokens[name][bad] = value
    tokens["logprobs"][5] = math.nan
    tokens["logprobs"].requires_grad_()
    got = policy_loss(**tokens, objective=PolicyObjective())
    got.backward()
    assert got.item() == expected.item()
    assert tokens["logprobs"].grad.isfinite().all()
    assert not tokens["logprobs"].grad[[2, 5]].any()


def test_nan_logprob_reaches_loss():
    """The policy's own NaN is a failure to be seen, not a token to be dropped."""
    tokens = make_tokens()
    tokens["logprobs"][1] = math.nan
    assert policy_loss(**tokens, objective=PolicyObjective()).isnan()


def test_no_tokens_at_all():
    tokens = {name: value[:0] for name, value in make_tokens().items()}
    tokens["cu_seqlens"] = torch.tensor([0])
    assert policy_loss(**tokens, objective=PolicyObjective()).item() == 0.0


@pytest.mark.parametrize("edges", [[], [0], [1, 7], [0, 6], [0, 8], [0, 5, 4, 7]])
def test_bad_cu_seqlens_are_rejected(edges):
    tokens = make_tokens() | {"cu_seqlens": torch.tensor(edges, dtype=torch.int64)}
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to T = 7"):
        policy_loss(**tokens, objective=PolicyObjective())


@pytest.mark.parametrize(
    "objective, message",
    [
        (PolicyObjective(kl_coef=0.1), "logprobs_ref is missing"),
        (PolicyObjective(entropy_coef=0.1), "entropy is missing"),
    ],
)
def test_missing_input_is_rejected(objective, message):
    with pytest.raises(ValueError, match=message):
        policy_loss(**make_tokens(), objective=objective)


def test_corrected_k3_is_right_on_stale_tokens():
    """Two actions, drawn by (0.9, 0.1), while the policy is (0.5, 0.5): without the importance
    weight the mean is 0.1061 in place of KL = 0.0872, and its derivative 0.2467 in place of 0.2118.
    """
    sampler, reference = torch.tensor([0.9, 0.1]).double(), torch.tensor([0.3, 0.7]).double()
    logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(0)
    estimator = {"kl_value": "corrected-k3", "kl_gradient": "corrected-k3"}
    inputs = {
        "logprobs_old": logprobs.detach(),
        "advantages": torch.zeros(2, dtype=torch.float64),
        "logprobs_ref": reference.log(),
        "importance_weights": 0.5 / sampler,
    }
    objective = PolicyObjective(kl_coef=1.0, **estimator)
    loss = (sampler * token_losses(logprobs, objective=objective, **inputs)).sum()
    loss.backward()
    assert loss.item() == pytest.approx(0.0872, abs=5e-5)
    assert logits.grad[0].item() == pytest.approx(0.2118, abs=5e-5)
