"""The worked examples of docs/worked-examples.md, by the functions that training uses."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from megadapo.algorithm.advantages import group_advantages, overlong_penalty
from megadapo.algorithm.importance import sequence_log_ratios
from megadapo.algorithm.loss_weights import Aggregation, sequence_weights
from megadapo.algorithm.objective import PolicyObjective
from megadapo.algorithm.reference import policy_loss

PPO = PolicyObjective(clip_low=0.2, clip_high=0.2)
DAPO = PolicyObjective(clip_low=0.2, clip_high=0.28)
GSPO = PolicyObjective(ratio="sequence", clip_low=0.2, clip_high=0.2)


def weights_of(lengths: list[int], aggregation: Aggregation) -> np.ndarray:
    """Return the weight of a token of each response of one group."""
    one_group = np.zeros(len(lengths), dtype=int)
    return sequence_weights(np.array(lengths), one_group, aggregation, loss_length=10)


def objective_of(
    ratios: list[float], objective: PolicyObjective, *, advantage: float = 1.0
) -> tuple[float, list[float]]:
    """Return the mean objective of one response, and its gradient times the number of tokens.

    The gradient is with respect to the new log-probs.
    """
    logprobs = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    tokens = torch.ones_like(logprobs).detach()
    loss = policy_loss(
        logprobs,
        0.0 * tokens,
        advantage * tokens,
        tokens / len(ratios),
        torch.tensor([0, len(ratios)]),
        objective=objective,
    )
    loss.backward()
    assert logprobs.grad is not None
    return -loss.item(), (-len(ratios) * logprobs.grad).tolist()


def sequence_ratio(log_ratios: Tensor) -> float:
    """Return GSPO's ratio of one sequence."""
    zeros = torch.zeros_like(log_ratios)
    one = torch.zeros(len(log_ratios), dtype=torch.int64)
    return sequence_log_ratios(log_ratios, zeros, one, num_sequences=1)[0].exp().item()


@pytest.mark.parametrize(
    ("aggregation", "total", "short", "long"),
    [
        ("token-mean", 0.76, 0.1, 0.07),
        ("group-token-mean", 0.76, 0.1, 0.07),
        ("seq-mean-token-mean", 0.85, 0.25, 0.04375),
        ("seq-mean-token-sum", 3.8, 0.5, 0.35),
        ("seq-mean-token-sum-norm", 0.38, 0.05, 0.035),
        ("seq-sum-token-mean", 1.7, 0.5, 0.0875),
        ("token-sum", 7.6, 1.0, 0.7),
    ],
)
def test_aggregations_of_two_responses(aggregation, total, short, long):
    """Two tokens with the value 1.0 each, and eight tokens with the value 0.7 each."""
    weights = weights_of([2, 8], aggregation)
    assert (weights * [1.0, 0.7]).tolist() == pytest.approx([short, long], rel=1e-12)
    assert weights @ [2 * 1.0, 8 * 0.7] == pytest.approx(total, rel=1e-12)


def test_all_tokens_are_counted_in_the_token_mean():
    """The texts divide by 100 where the responses have 2 + 88 tokens."""
    assert weights_of([2, 88], "token-mean").tolist() == [1 / 90] * 2
    assert weights_of([2, 88], "seq-mean-token-mean").tolist() == [1 / 4, 1 / 176]


def test_credit_of_a_token_by_the_length_of_its_response():
    """A short right answer gets three times as much a token as a long one."""
    values = group_advantages([1.0, 1.0, -1.0], normalize_by_std=False)
    credit = values * weights_of([2, 6, 6], "seq-sum-token-mean")
    assert credit.tolist() == pytest.approx([1 / 3, 1 / 9, -2 / 9], rel=1e-12)


def test_gspo_against_grpo():
    """The texts have 1.0 for GRPO, where min(0.4, 0.8) is 0.4 and the mean 0.8."""
    value, gradient = objective_of([2.0, 0.4], PPO)
    assert value == pytest.approx(0.8, rel=1e-12)
    assert gradient == pytest.approx([0.0, 0.4], rel=1e-12)
    value, gradient = objective_of([2.0, 0.4], GSPO)
    assert value == pytest.approx(0.894427191, abs=1e-9)
    assert gradient == pytest.approx([0.894427191] * 2, abs=1e-9)


@pytest.mark.parametrize(
    ("objective", "probability", "highest"),
    [(PPO, 0.01, 0.012), (PPO, 0.9, 1.08), (DAPO, 0.01, 0.0128), (DAPO, 0.9, 1.152)],
)
def test_highest_probability_that_the_clip_lets_a_token_reach(objective, probability, highest):
    """A token of probability 0.9 cannot reach its bound, and one of 0.01 is held at once."""
    for step, is_free in ((-1e-6, True), (1e-6, False)):
        _, [slope] = objective_of([highest / probability + step], objective)
        assert (slope != 0.0) == is_free


def test_geometric_mean_of_gibberish():
    """One token of four became 200 times as likely."""
    ratios = torch.tensor([200.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    assert ratios.mean() == 50.75
    assert sequence_ratio(ratios.log()) == pytest.approx(3.76, abs=1e-3)
    # clipped, so none of the four tokens has a gradient
    assert objective_of(ratios.tolist(), GSPO)[1] == [0.0] * 4


def test_geometric_mean_of_a_loop():
    """The certain tokens of a loop, whose ratio is 1, hide the token that changed."""
    ratios = torch.ones(400, dtype=torch.float64)
    ratios[0] = 200.0
    assert sequence_ratio(ratios.log()) == pytest.approx(1.013334, abs=1e-6)
    gradient = objective_of(ratios.tolist(), GSPO)[1]
    assert gradient == pytest.approx([1.013334] * 400, abs=1e-6)


def test_impossible_token_in_a_sequence_ratio():
    """The clamp of a token's log-ratio at -20 also bounds what one token does to a sequence."""
    log_ratios = torch.zeros(8, dtype=torch.float64)
    log_ratios[0] = math.log(1e-30 / 0.6)
    assert log_ratios.mean().exp() == pytest.approx(1.9e-4, abs=1e-6)
    assert sequence_ratio(log_ratios) == pytest.approx(math.exp(-20 / 8), rel=1e-9)
    assert math.exp(-20 / 8) == pytest.approx(0.082, abs=1e-4)


@pytest.mark.parametrize(
    ("aggregation", "net", "net_of_rewards"),
    [("token-mean", 0.0, -0.03125), ("seq-mean-token-mean", 0.0034991, -0.0272727)],
)
def test_shared_prefix_of_one_right_and_two_wrong_answers(aggregation, net, net_of_rewards):
    """AAA: 10 tokens and right, 11 and wrong, 11 and wrong, which start with the same tokens."""
    weights = weights_of([10, 11, 11], aggregation)
    centred = group_advantages([1.0, -1.0, -1.0])
    assert weights @ centred == pytest.approx(net, abs=1e-7)
    raw = group_advantages([1.0, -1.0, -1.0], rule="reinforce++")
    assert weights @ raw == pytest.approx(net_of_rewards, abs=1e-7)


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (20481, -1.0)],
)
def test_soft_punishment_at_the_papers_lengths(length, penalty):
    assert overlong_penalty(length, max_length=20480, buffer=4096) == pytest.approx(penalty)
    assert overlong_penalty(length, max_length=10, buffer=0) == 0.0
