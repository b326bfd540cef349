"""The rules beside TRL 1.16.0 and verl 0.9.1 on fixed inputs, where they define the same thing.

`tools/public_losses.py` wrote their numbers; docs/algorithms.md says what is defined differently.
"""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megadapo.algorithm.advantages import group_advantages, whitened
from megadapo.algorithm.gae import generalized_advantages, token_rewards, value_losses
from megadapo.algorithm.loss_weights import sequence_weights
from megadapo.algorithm.objective import PolicyObjective
from megadapo.algorithm.preferences import pair_losses
from megadapo.algorithm.reference import kl_estimates, policy_loss
from tools.public_losses import FEATURES, LEARNING_RATE, MINI_BATCHES, START, TOKENS

HERE = Path(__file__).parent
TRL, VERL = (json.loads((HERE / "public" / f"{name}.json").read_text()) for name in ("trl", "verl"))
INPUTS: dict[str, Any] = TRL["inputs"]
LENGTHS = np.array(INPUTS["lengths"])
SEQUENCES = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
SEQUENCE_MEAN = "seq-mean-token-mean"
RELATIVE = 1e-6
"""Theirs are in fp64 but for a mask or a temperature, and have 1e-8 below some fractions."""


def flat(rows: list[list[float]]) -> list[float]:
    return list(chain.from_iterable(rows))


def tokens(name: str) -> Tensor:
    return torch.tensor(flat(INPUTS[name]), dtype=torch.float64)


def per_token(values: np.ndarray) -> Tensor:
    return torch.tensor(values[SEQUENCES])


def loss_and_gradient(
    objective: PolicyObjective, aggregation: str, loss_length: int | None = None
) -> tuple[float, list[float]]:
    logprobs = tokens("logprobs").requires_grad_()
    weights = sequence_weights(
        LENGTHS, np.array([0, 0, 1, 1]), aggregation, loss_length=loss_length
    )
    loss = policy_loss(
        logprobs,
        tokens("logprobs_old"),
        per_token(np.array(INPUTS["advantages"])),
        per_token(weights),
        torch.tensor([0, *LENGTHS.cumsum()]),
        objective=objective,
        logprobs_ref=tokens("logprobs_ref"),
    )
    loss.backward()
    return loss.item(), logprobs.grad.tolist()


def near(expected: object, relative: float = RELATIVE) -> object:
    return pytest.approx(expected, rel=relative, abs=1e-9)


CLIP = {"clip_high": 0.2}
CORRECTED = {"kl_value": "corrected-k3", "kl_gradient": "corrected-k3"}
GSPO = PolicyObjective(ratio="sequence", clip_low=0.05, clip_high=0.1)
CISPO = PolicyObjective(gate="weight", weight_max=1.5)
SAPO = PolicyObjective(gate="soft")
RULES = {
    "trl grpo": (PolicyObjective(**CLIP), SEQUENCE_MEAN),
    "trl grpo-k3": (PolicyObjective(**CLIP, kl_coef=0.04), SEQUENCE_MEAN),
    "trl grpo-corrected-k3": (PolicyObjective(**CLIP, kl_coef=0.04, **CORRECTED), SEQUENCE_MEAN),
    "trl dapo": (PolicyObjective(), "token-mean"),
    "trl dapo-delta": (PolicyObjective(dual_clip=3.0), "token-mean"),
    "trl dr-grpo": (PolicyObjective(**CLIP), "seq-mean-token-sum-norm"),
    "trl gspo": (GSPO, SEQUENCE_MEAN),
    "trl cispo": (CISPO, "token-mean"),
    "trl sapo": (SAPO, SEQUENCE_MEAN),
    "verl dapo token-mean": (PolicyObjective(dual_clip=3.0), "token-mean"),
    "verl dapo token-sum": (PolicyObjective(dual_clip=3.0), "token-sum"),
    "verl dapo seq-mean-token-mean": (PolicyObjective(dual_clip=3.0), SEQUENCE_MEAN),
    "verl dapo seq-mean-token-sum": (PolicyObjective(dual_clip=3.0), "seq-mean-token-sum"),
    "verl gspo": (GSPO, SEQUENCE_MEAN),
    "verl cispo": (CISPO, "token-mean"),
    "verl sapo": (SAPO, SEQUENCE_MEAN),
}


def results(rule: str) -> dict[str, Any]:
    library, name = rule.split(" ", 1)
    found: dict[str, Any] = {"trl": TRL, "verl": VERL}[library]["results"][name]
    return found


def test_public_numbers_have_documented_versions():
    assert TRL["versions"]["trl"] == "1.16.0" and VERL["versions"]["verl"] == "0.9.1"
    assert TRL["inputs"] == VERL["inputs"]


@pytest.mark.parametrize("rule", list(RULES))
def test_losses_and_their_gradients(rule):
    objective, aggregation = RULES[rule]
    length = 8 if aggregation == "seq-mean-token-sum-norm" else None
    loss, gradient = loss_and_gradient(objective, aggregation, length)
    expected = results(rule)
    assert loss == near(expected["loss"])
    assert gradient == near(flat(expected["gradient"]))


PASSES = {
    "trl grpo": (PolicyObjective(**CLIP), SEQUENCE_MEAN, 1e-9),
    "trl dapo": (PolicyObjective(), "token-mean", 1e-9),
    "verl dapo token-sum": (PolicyObjective(dual_clip=3.0), "token-sum", 1e-9),
    "verl dapo token-mean": (PolicyObjective(dual_clip=3.0), "token-mean", 1e-8),
}
"""Theirs and ours, and how near: verl's mean has 1e-8 below the fraction."""


@pytest.mark.parametrize("num_passes", [2, 4])
@pytest.mark.parametrize("rule", list(PASSES))
def test_updates_of_several_passes(rule, num_passes):
    """Old log-probs computed again in the second pass would give other losses from there on."""
    objective, aggregation, relative = PASSES[rule]
    features, targets = torch.tensor(FEATURES, dtype=torch.float64), torch.tensor(TOKENS)
    weights = torch.tensor(START, dtype=torch.float64).requires_grad_()

    def logprobs() -> Tensor:
        return (features @ weights).log_softmax(-1).gather(1, targets[:, None])[:, 0]

    old, expected, clipped = logprobs().detach(), results(f"{rule} passes {num_passes}"), 0
    for number, rows in enumerate(MINI_BATCHES * num_passes):
        places, lengths = np.isin(SEQUENCES, rows), LENGTHS[rows]
        token_weights = sequence_weights(lengths, np.zeros(len(rows), np.int64), aggregation)
        now = logprobs()[places]
        loss = policy_loss(
            now,
            old[places],
            per_token(np.array(INPUTS["advantages"]))[places],
            torch.tensor(token_weights.repeat(lengths)),
            torch.tensor([0, *lengths.cumsum()]),
            objective=objective,
        )
        (gradient,) = torch.autograd.grad(loss, weights)
        assert loss.item() == near(expected["losses"][number], relative)
        assert gradient.flatten().tolist() == near(flat(expected["gradients"][number]), relative)
        weights = (weights - LEARNING_RATE * gradient).detach().requires_grad_()
        clipped += int(((now - old[places]).exp() - 1.0).abs().ge(0.28).sum())
    assert weights.flatten().tolist() == near(flat(expected["weights"]), relative)
    assert clipped, "without a clipped token other rules would pass, too"


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [("k1", "k1", "k1"), ("k2", "k2", "k2"), ("k3", "k3", "k3"), ("k3+", "k3", "k2")],
)
def test_estimators_of_the_kl_divergence(kind, value, slope):
    """verl's k3+ is what `kl_value = "k3"` with `kl_gradient = "k2"` is here."""
    logprobs = tokens("logprobs").requires_grad_()
    gap = tokens("logprobs_ref") - logprobs
    ones = torch.ones_like(gap)
    kl_estimates(gap, ones, slope).sum().backward()
    expected = results(f"verl {kind}")
    assert kl_estimates(gap, ones, value).tolist() == near(flat(expected["values"]))
    assert logprobs.grad.tolist() == near(flat(expected["gradient"]))


@pytest.mark.parametrize("rule", ["grpo", "dr-grpo", "rloo"])
def test_advantages_of_groups(rule):
    """verl divides by the standard deviation plus 1e-6, here there is no epsilon."""
    ours = []
    for rewards in (INPUTS["rewards"][:2], INPUTS["rewards"][2:]):
        values = group_advantages(
            rewards, rule="rloo" if rule == "rloo" else "grpo", normalize_by_std=rule == "grpo"
        )
        std = np.std(rewards, ddof=1)
        ours.append(values * std / (std + 1e-6) if rule == "grpo" else values)
    expected = flat(results("verl advantages")[rule])
    assert np.concatenate(ours)[SEQUENCES].tolist() == near(expected, 1e-9)


@pytest.mark.parametrize("rule", ["reinforce++", "reinforce++-baseline"])
def test_advantages_whitened_over_all_tokens(rule):
    """verl adds 1e-8 to the variance."""
    groups = [INPUTS["rewards"][:2], INPUTS["rewards"][2:]]
    values = np.concatenate([group_advantages(group, rule=rule) for group in groups])
    ours = whitened(values, LENGTHS)[SEQUENCES].tolist()
    assert ours == near(flat(results("verl advantages")[rule]))


def test_generalized_advantages_and_returns():
    scores, values = np.array(INPUTS["rewards"])[SEQUENCES], np.array(flat(INPUTS["values"]))
    raw = generalized_advantages(
        token_rewards(scores, SEQUENCES), values, SEQUENCES, discount=0.99, gae_lambda=0.95
    )
    expected = results("verl advantages")
    assert (raw + values).tolist() == near(flat(expected["gae-returns"]), 1e-9)
    ones = np.ones(len(raw), dtype=np.int64)
    assert whitened(raw, ones).tolist() == near(flat(expected["gae"]))


def test_clipped_value_loss():
    values = tokens("values").requires_grad_()
    returns = per_token(np.array(INPUTS["rewards"]))
    losses, clipped = value_losses(values, tokens("values_old"), returns, value_clip=0.2)
    losses.mean().backward()
    expected = results("verl value-loss")
    assert losses.mean().item() == near(expected["loss"])
    assert values.grad.tolist() == near(flat(expected["gradient"]))
    assert clipped.any() and not clipped.all()


def test_pair_loss_of_a_reward_model():
    chosen, rejected = np.array(INPUTS["rewards"]).reshape(2, 2)
    losses, slopes = pair_losses(chosen, rejected)
    expected = results("trl pairs")
    assert losses.mean() == near(expected["loss"], 1e-9)
    assert [*slopes / 2, *-slopes / 2] == near(expected["gradient"], 1e-9)
