"""From sums of mini-batches to the numbers of a step, gradient shares and clip bounds."""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from megadapo.algorithm.bapo import BapoBounds, BapoConfig, bapo_sums
from megadapo.algorithm.objective import PolicyObjective
from megadapo.algorithm.reference import token_losses
from megadapo.kernels.policy_head import policy_head_loss, token_logprobs
from megadapo.trainer.batch.micro_batch import MicroBatch, build_micro_batch
from megadapo.trainer.critic import CRITIC_SUMS, add_values, summarize_critic
from megadapo.trainer.model.head import PolicyHead
from megadapo.trainer.update.metrics import Sums, summarize
from megadapo.trainer.update.step import sums_of
from tests.support.runs.step_results import UPDATE, area
from tests.support.trainer.batches import random_batch

OBJECTIVES = {
    "dapo": PolicyObjective(),
    "dual clip": PolicyObjective(dual_clip=1.5),
    "soft": PolicyObjective(gate="soft"),
    "weight": PolicyObjective(gate="weight", weight_max=1.2),
    "reinforce": PolicyObjective(ratio="none", gate="none"),
    "with more terms": PolicyObjective(kl_coef=0.5, entropy_coef=0.1),
}
CONFIG = BapoConfig()


def sums(changes: Mapping[str, float] | None = None) -> Sums:
    usual = {
        "policy/loss": 2.0,
        "tokens": 4.0,
        "policy/entropy": 2.0,
        "policy/clip_high_fraction": 2.0,
        "fresh_tokens": 2.0,
        "parity/logprob_abs_mean": 0.5,
        "parity/logprob_abs_max": 0.4,
    }
    found = Sums()
    found.update({**usual, **(changes or {})})
    return found


def step_of(mini_batches: list[Sums], **changes):
    usual = {"grad_norms": [1.0], "lr": 1e-6, "num_mini_batches": len(mini_batches)}
    usual |= {"version_gaps": np.zeros(4, dtype=np.int32), "num_left_out": None}
    usual |= {"bounds": (), "chosen_shares": (), "kl_coef": 0.0, "old_kl_coef": 0.0}
    return summarize(mini_batches, **(usual | changes))


def test_means_are_over_their_own_counts_and_not_over_mini_batches():
    later = {"tokens": 12.0, "policy/entropy": 14.0, "policy/dual_clip_fraction": 4.0}
    later |= {"policy/clip_high_fraction": 6.0, "policy/clip_high_probability": 1.5}
    result = step_of([sums(), sums(later | {"fresh_tokens": 0.0, "parity/logprob_abs_mean": 0.0})])
    assert result["policy/dual_clip_fraction"] == pytest.approx(0.25)
    assert result["policy/entropy"] == pytest.approx(1.0)
    assert result["policy/clip_high_probability"] == pytest.approx(1.5 / 8)
    assert result["parity/logprob_abs_mean"] == pytest.approx(0.25)
    assert result["tokens/trained"] == 16
    assert result["policy/loss"] == pytest.approx(2.0)


def test_ratio_error_is_of_the_first_mini_batch():
    """Later ones see other weights; their ratio is meant to differ from 1."""
    name = "policy/ratio_first_max_error"
    for first, later in ((0.0, 0.3), (1e-7, 0.0)):
        assert step_of([sums({name: first}), sums({name: later})])[name] == first


def test_divergence_that_steers_is_of_the_last_update():
    """The mean has the first update's 0, which would halve the coefficient for ever."""
    updates = [sums({"tokens": 4.0, "policy/approx_kl": value}) for value in (0.0, 0.02, 0.4)]
    found = step_of(updates, old_kl_coef=0.7)
    assert (found["kl/from_old"], found["kl/old_coef"]) == (pytest.approx(0.1), 0.7)
    assert step_of(updates[:1], old_kl_coef=0.7)["kl/from_old"] is None
    without = step_of(updates)
    assert without["kl/from_old"] is without["kl/old_coef"] is None


def test_largest_value_is_of_all_mini_batches():
    name = "parity/logprob_abs_max"
    for values in ((0.1, 0.7), (0.7, 0.1)):
        assert step_of([sums({name: value}) for value in values])[name] == 0.7


def test_staleness_is_of_publications():
    gaps = np.array([0, 0, 0, 0, 1, 1, 3, 3])
    found = area(step_of([sums()], version_gaps=gaps), "staleness")
    assert (found["token_share"], found["mean"], found["max"]) == (0.5, 1.0, 3)


def test_unmeasured_numbers_are_null_or_nan():
    """0.0 would read as perfect parity, as a vanished gradient, or as a search that found 0."""
    assert step_of([sums()])["staleness/token_share"] == 0.0
    nothing = sums({"tokens": 0.0, "fresh_tokens": 0.0, "parity/logprob_abs_max": 0.0})
    result = step_of([nothing], grad_norms=[], version_gaps=np.empty(0, dtype=np.int32))
    for name in ("parity", "staleness", "bapo", "kl", "pretraining"):
        assert set(area(result, name).values()) == {None}
    assert math.isnan(result["policy/entropy"]) and math.isnan(result["policy/grad_norm"])
    assert result["policy/skipped_updates"] == 1 and result["tokens/trained"] == 0
    # a gradient that is not finite
    record = step_of([sums({"logit_gradient": math.nan})])
    assert record["policy/rare_share_in_logits"] is None


def test_searched_bounds_are_means_and_the_smallest_share():
    """Updates without tokens have no share."""

    def found(high: float, before: float, share: float) -> BapoBounds:
        return BapoBounds(low=0.6, high=high, share_before=before, share=share)

    bounds = [found(1.2, 0.5, 0.5), found(2.0, 0.3, 0.4), found(1.2, math.nan, math.nan)]
    assert area(step_of([sums()], bounds=bounds), "bapo") == {
        "clip_low": pytest.approx(0.6),
        "clip_high": pytest.approx(4.4 / 3),
        "share_before": pytest.approx(0.4),
        "share": pytest.approx(0.45),
        "share_min": 0.4,
    }


def test_every_metric_of_the_trainer_is_given():
    critic = critic_sums(np.ones(1), np.zeros(1))
    found = step_of([sums()]) | summarize_critic([critic], grad_norms=[], lr=0.0)
    # the probe compares with the engines, and the driver steers the entropy
    others = ("experts/", "parity/probe_", "entropy/")
    expected = {name for name in UPDATE.metrics if not name.startswith(others)}
    assert found.keys() == expected


def critic_sums(values: np.ndarray, returns: np.ndarray, **others: float) -> Sums:
    found = Sums(CRITIC_SUMS)
    found.update({f"critic/{name}": value for name, value in others.items()})
    add_values(found, torch.from_numpy(values), torch.from_numpy(returns))
    return found


def test_statistics_of_parts_equal_the_whole():
    rng = np.random.default_rng(0)
    returns = rng.normal(0.4, 1.0, 60)
    values = 0.5 * returns + rng.normal(0.0, 0.3, 60)
    cuts = [slice(0, 1), slice(1, 45), slice(45, 60)]
    parts = [critic_sums(values[cut], returns[cut], loss=0.3, clip_fraction=2.0) for cut in cuts]
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
    parts = [critic_sums(np.linspace(-1, 1, 7), np.full(7, 0.1))] * 3
    assert summarize_critic(parts, grad_norms=[], lr=0.1)["critic/explained_variance"] is None
    assert summarize_critic([Sums(CRITIC_SUMS)], grad_norms=[], lr=0.1) == {"critic/lr": 0.1}


def _micro_batch() -> MicroBatch:
    batch = random_batch([9, 4, 12])
    return build_micro_batch(
        batch,
        np.arange(3),
        predicted=batch.is_trained,
        policy_version=0,
        inverse_frequencies=None,
        token_multiple=1,
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradient_shares_are_those_of_autograd(name):
    """They are the policy term's: the definition is computed without KL divergence and entropy."""
    objective, micro_batch = OBJECTIVES[name], _micro_batch()
    source, rows = torch.Generator().manual_seed(5), micro_batch.rows
    hidden = torch.randn(len(micro_batch.targets), 8, generator=source)
    weight = torch.randn(300, 8, generator=source) / 4
    logprobs, *_ = token_logprobs(hidden, weight, micro_batch.targets)
    old = logprobs + 0.3 * torch.randn(len(logprobs), generator=source)
    weights = torch.ones_like(old)
    weights[rows[:3]] = torch.tensor([0.0, 0.5, math.nan])
    micro_batch = replace(
        micro_batch, proximal=old, logprobs_old=old, importance_weights=weights, logprobs_ref=old
    )
    options = {"temperature": 1.0, "vocab_size": 300, "wait_for_weight": lambda _: None}
    head = PolicyHead(objective=objective, **options)
    output = policy_head_loss(
        hidden,
        weight,
        micro_batch.targets,
        logprobs_old=old,
        advantages=micro_batch.advantages,
        loss_weights=micro_batch.loss_weights,
        importance_weights=weights,
        logprobs_ref=old,
        objective=objective,
        rows=rows,
    )
    found = Sums()
    found.add(micro_batch, output, head)
    kept = rows[weights[rows].isfinite()]
    asked = logprobs[kept].requires_grad_()
    losses = token_losses(
        asked,
        old[kept],
        micro_batch.advantages[kept],
        objective=objective.model_copy(update={"kl_coef": 0.0, "entropy_coef": 0.0}),
        importance_weights=weights[kept],
    )
    (micro_batch.loss_weights[kept] * losses).sum().backward()
    assert asked.grad is not None
    sizes = asked.grad.abs()
    positive = sizes[micro_batch.advantages[kept] > 0].sum().item()
    assert found["logprob_gradient"] == pytest.approx(sizes.sum().item(), rel=1e-5)
    assert found["policy/positive_share_in_logprobs"] == pytest.approx(positive, rel=1e-5)
    assert 0.0 < positive < found["logprob_gradient"]
    p = (hidden @ weight.T).double().softmax(-1)[kept]
    onehot = torch.nn.functional.one_hot(micro_batch.targets[kept], 300)
    sizes = sizes * (onehot - p).norm(dim=1)
    assert found["logit_gradient"] == pytest.approx(sizes.sum().item(), rel=1e-5)
    positive = sizes[micro_batch.advantages[kept] > 0].sum().item()
    assert found["policy/positive_share_in_logits"] == pytest.approx(positive, rel=1e-5)
    rare = sizes[logprobs[kept].exp() < 0.2].sum().item()
    assert found["policy/rare_share_in_logits"] == pytest.approx(rare, rel=1e-5)


def test_clipped_sequences_are_those_without_a_gradient():
    """A sequence of 6, one of 3 and one of 8 tokens: the clip cuts the second and third.

    A context-parallel rank, which has some tokens of each, adds its part.
    """
    objective = PolicyObjective(ratio="sequence", clip_low=0.2, clip_high=0.2)
    micro_batch = _micro_batch()
    rows = micro_batch.rows
    sizes = np.bincount(micro_batch.sequences)
    assert sizes.tolist() == [6, 3, 8]
    source = torch.Generator().manual_seed(5)
    hidden = torch.randn(len(micro_batch.targets), 8, generator=source)
    weight = torch.randn(300, 8, generator=source) / 4
    sequences = torch.from_numpy(micro_batch.sequences)
    advantages = torch.zeros_like(micro_batch.advantages)
    advantages[rows] = torch.tensor([1.0, 1.0, -1.0])[sequences]
    # the old log-prob stands for the log of the sequence's ratio
    ratios = torch.zeros_like(advantages)
    ratios[rows] = torch.tensor([1.1, 1.3, 0.7]).log()[sequences]
    weights = torch.ones_like(ratios)
    micro_batch = replace(
        micro_batch,
        proximal=ratios,
        logprobs_old=ratios,
        advantages=advantages,
        importance_weights=weights,
    )
    output = policy_head_loss(
        hidden,
        weight,
        micro_batch.targets,
        logprobs_old=ratios,
        advantages=advantages,
        loss_weights=micro_batch.loss_weights,
        importance_weights=weights,
        objective=objective,
        rows=rows,
    )
    options = {"temperature": 1.0, "vocab_size": 300, "wait_for_weight": lambda _: None}
    head = PolicyHead(objective=objective, **options)
    found = Sums()
    found.add(micro_batch, output, head)
    assert found.value("policy/clipped_sequences") == pytest.approx(2 / 3, rel=1e-12)
    assert found["policy/clip_low_fraction"] + found["policy/clip_high_fraction"] == 3 + 8
    largest = output.logprobs[rows[sequences == 1]].exp().max().item()
    assert found.value("policy/clip_high_probability_max") == pytest.approx(largest)
    # tokens with a masked weight are not cut by the clip
    weights[rows[sequences == 2]] = 0.0
    masked = Sums()
    masked.add(micro_batch, output, head)
    assert masked.value("policy/clipped_sequences") == pytest.approx(1 / 3, rel=1e-12)
    half = replace(
        micro_batch,
        rows=rows[::2],
        own_of_all_ranks=micro_batch.own_of_all_ranks[::2],
        logprobs_rollout=micro_batch.logprobs_rollout[::2],
        is_current=micro_batch.is_current[::2],
        is_stale=micro_batch.is_stale[::2],
    )
    part = Sums()
    part.add(half, output, head)
    assert part["sequences"] == pytest.approx(3 / 6 + 2 / 3 + 4 / 8)
    assert Sums().value("policy/clipped_sequences") is None


def test_tokens_count_by_their_weights_in_the_loss():
    """A search over tokens that the update masks, or halves, finds bounds for another loss."""
    micro_batch = _micro_batch()
    rows = micro_batch.rows
    source = np.random.default_rng(3)
    old = torch.from_numpy(source.normal(-2.0, 0.3, micro_batch.num_tokens)).float()
    logprobs = old + torch.from_numpy(source.normal(0.0, 0.5, micro_batch.num_tokens)).float()
    weights = torch.ones_like(old)
    weights[rows[:4]] = torch.tensor([0.0, 0.5, 2.0, math.nan])
    micro_batch = replace(micro_batch, logprobs_old=old, importance_weights=weights)
    ratios = (logprobs - old).exp()[rows]
    advantages = (micro_batch.advantages * micro_batch.loss_weights)[rows]
    kept = [1, 2, *range(4, len(rows))]
    expected = bapo_sums(ratios[kept], (advantages * weights[rows])[kept], CONFIG)
    current = torch.stack([logprobs, torch.from_numpy(source.uniform(0, 1.4, len(old))).float()])
    found = sums_of(micro_batch, current, CONFIG)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
    in_logits = CONFIG.model_copy(update={"statistic": "logit_share"})
    sizes = (advantages * weights[rows] * current[1][rows])[kept]
    found = sums_of(micro_batch, current, in_logits)
    torch.testing.assert_close(found, bapo_sums(ratios[kept], sizes, CONFIG), rtol=1e-6, atol=0.0)
    plain = sums_of(replace(micro_batch, importance_weights=None), current, CONFIG)
    torch.testing.assert_close(plain, bapo_sums(ratios, advantages, CONFIG), rtol=1e-12, atol=0.0)
