"""Gates that choose tokens by covariance, beside verl's two functions in float64."""

import numpy as np
import pytest
import torch

from megadapo.algorithm.covariance import choose_tokens
from megadapo.algorithm.objective import PolicyObjective
from megadapo.algorithm.reference import policy_loss

N = 400
GENERATOR = np.random.default_rng(3)
LOGPROBS = -GENERATOR.exponential(1.0, N)
OLD = LOGPROBS - GENERATOR.normal(0.0, 0.15, N)
ADVANTAGES = np.repeat(GENERATOR.choice([-1.2, 0.4, 0.9], N // 20), 20)
CLIP_COV = PolicyObjective(gate="clip_cov", cov_share=0.05, cov_low=0.2, cov_high=1.5)
KL_COV = PolicyObjective(gate="kl_cov", cov_share=0.05, cov_coef=0.7)
DRAW = (1, 2, 0)


def choose(objective: PolicyObjective, draw: tuple[int, ...] = DRAW, **changes: np.ndarray):
    values = {"logprobs": LOGPROBS, "logprobs_old": OLD, "advantages": ADVANTAGES} | changes
    return choose_tokens(**values, objective=objective, draw=draw)


def covariance() -> torch.Tensor:
    advantages, logprobs = torch.from_numpy(ADVANTAGES), torch.from_numpy(LOGPROBS)
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def losses(logprobs: torch.Tensor, objective: PolicyObjective) -> torch.Tensor:
    """Return what verl 0.8.0.dev takes the mean of, for the same choice of tokens."""
    old, advantages = torch.from_numpy(OLD), torch.from_numpy(ADVANTAGES)
    chosen = torch.from_numpy(choose(objective))
    change = logprobs - old
    plain = -advantages * change.exp()
    if objective.gate == "kl_cov":
        return torch.where(chosen, plain + objective.cov_coef * change.abs(), plain)
    window = (1.0 - objective.clip_low, 1.0 + objective.clip_high)
    clipped = -advantages * change.exp().clamp(*window)
    return torch.maximum(plain, clipped) * (~chosen).double()


@pytest.mark.parametrize("objective", [CLIP_COV, KL_COV], ids=["clip_cov", "kl_cov"])
def test_loss_and_gradient_equal_verl_for_the_same_tokens(objective):
    """Left-out tokens still count in the mean."""
    theirs = torch.from_numpy(LOGPROBS).requires_grad_()
    expected = losses(theirs, objective).mean()
    expected.backward()
    chosen = choose(objective)
    assert chosen.sum() == 20
    is_left_out = chosen & (objective.gate == "clip_cov")
    ours = torch.from_numpy(LOGPROBS.copy()).requires_grad_()
    penalties = torch.from_numpy(objective.cov_coef * chosen)
    loss = policy_loss(
        ours,
        torch.from_numpy(OLD),
        torch.from_numpy(np.where(is_left_out, 0.0, ADVANTAGES)),
        torch.full((N,), 1.0 / N, dtype=torch.float64),
        torch.tensor([0, N]),
        objective=objective,
        penalties=penalties if objective.gate == "kl_cov" else None,
    )
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    np.testing.assert_allclose(ours.grad, theirs.grad, rtol=1e-9, atol=1e-15)
    assert not ours.grad[is_left_out].any()


@pytest.mark.parametrize("share", [1e-5, 0.05, 1.0])
def test_kl_cov_chooses_the_highest_covariances(share):
    found = choose(KL_COV.model_copy(update={"cov_share": share}))
    best = torch.topk(covariance(), max(1, int(N * share))).indices
    assert set(np.flatnonzero(found)) == set(best.tolist())


def test_clip_cov_draws_from_the_window_without_clipped_tokens():
    ratios = np.exp(LOGPROBS - OLD)
    clipped = ((ADVANTAGES > 0) & (ratios > 1.28)) | ((ADVANTAGES < 0) & (ratios < 0.8))
    found = covariance().numpy()
    candidates = (found > 0.2) & (found < 1.5) & ~clipped
    assert 20 < candidates.sum() < N // 2 and (clipped & (found > 0.2) & (found < 1.5)).any()
    chosen = choose(CLIP_COV)
    assert chosen.sum() == 20 and not (chosen & ~candidates).any()
    everything = choose(CLIP_COV.model_copy(update={"cov_share": 1.0}))
    np.testing.assert_array_equal(everything, candidates)
    assert not choose(CLIP_COV.model_copy(update={"cov_low": 90.0, "cov_high": 99.0})).any()


def test_draw_repeats_and_differs_by_update():
    np.testing.assert_array_equal(choose(CLIP_COV), choose(CLIP_COV))
    assert (choose(CLIP_COV) != choose(CLIP_COV, draw=(1, 2, 1))).any()


def test_token_that_leaves_the_window_is_replaced_by_one_other():
    """A permutation of the candidates would choose all others again."""
    before = choose(CLIP_COV)
    place = np.flatnonzero(before)[5]
    old = OLD.copy()
    # clipped, at the same covariance
    old[place] = LOGPROBS[place] - np.copysign(1.0, ADVANTAGES[place])
    after = choose(CLIP_COV, logprobs_old=old)
    assert before[place] and not after[place]
    assert (before != after).sum() == 2


@pytest.mark.parametrize("objective", [CLIP_COV, KL_COV])
def test_mini_batch_without_tokens_has_no_choice(objective):
    nothing = np.zeros(0)
    empty = {"logprobs": nothing, "logprobs_old": nothing, "advantages": nothing}
    assert choose(objective, **empty).shape == (0,)
