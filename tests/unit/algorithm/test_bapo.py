"""BAPO's search against the paper's loop written out, and against numbers worked by hand."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from megadapo.algorithm.bapo import BapoConfig, bapo_sums, num_bapo_sums, search_bounds
from megadapo.algorithm.objective import PolicyObjective

ADVANTAGES = torch.tensor([1.0, 1.0, 1.0] + [-1.0] * 7)
RATIOS = torch.tensor([1.0, 1.5, 2.52, 0.5, 0.75, 1.0, 1.1, 1.0, 1.0, 1.25])
OFFICIAL = {"low": (0.6, 0.8, 0.05), "high": (1.2, 2.0, 0.05), "target_share": 0.5}


@pytest.mark.parametrize(
    ("options", "bounds", "share", "before"),
    [
        ({"statistic": "share"}, (0.6, 2.0), 0.401785714, 0.336633663),
        ({"statistic": "gradient_share"}, (0.6, 2.55), 0.451438849, 0.140845070),
        ({"statistic": "official"}, (0.9, 2.3), 0.401673640, 0.336633663),
        ({"statistic": "official", **OFFICIAL}, (0.8, 2.0), 0.393013100, 0.336633663),
    ],
    ids=["share", "gradient_share", "official", "official-misses-its-target"],
)
def test_bounds_and_shares(options, bounds, share, before):
    config = BapoConfig(**options)
    found = search_bounds(bapo_sums(RATIOS, ADVANTAGES, config).numpy(), config)
    assert (found.low, found.high) == bounds
    assert found.share == pytest.approx(share, abs=3e-8)
    assert found.share_before == pytest.approx(before, abs=3e-8)


def loop(ratios: Tensor, advantages: Tensor, config: BapoConfig) -> tuple[float, float, float]:
    """Run algorithm 1: try each pair of bounds on every token."""
    ratios, sizes = ratios.double(), advantages.abs().double()

    def share(low: float, high: float) -> float:
        # as the head compares: in the ratios' own precision
        low, high = float(np.float32(low)), float(np.float32(high))
        good, bad = advantages > 0, advantages < 0
        if config.statistic == "gradient_share":
            good, bad = good & (ratios <= high), bad & (ratios >= low)
            positive = (ratios * sizes)[good].sum()
            return float(positive / (positive + (ratios * sizes)[bad].sum()))
        positive = (ratios.clamp(max=high) * sizes)[good].sum()
        return float(positive / (positive + (ratios.clamp(min=low) * sizes)[bad].sum()))

    (low, low_max, low_step), (high, high_max, high_step) = config.low, config.high
    while share(low, high) < config.target_share and low + low_step <= low_max + 1e-9:
        if high + high_step <= high_max + 1e-9:
            high = round(high + high_step, 12)
        else:
            low = round(low + low_step, 12)
    return low, high, share(low, high)


@pytest.mark.parametrize("statistic", ["share", "gradient_share"])
@pytest.mark.parametrize("offset", [-0.6, -0.35, -0.1, 0.3])
def test_search_matches_plain_loop(statistic, offset):
    """With ratios on edges and at the clamp; from a target that is met at once to one never met."""
    generator = torch.Generator().manual_seed(round(100 * (1 + offset)))
    ratios = (0.5 * torch.randn(500, generator=generator)).exp()
    ratios[:74] = torch.from_numpy(BapoConfig().high_edges.repeat(2)).float()
    ratios[74:90] = torch.from_numpy(BapoConfig().low_edges).float()
    ratios[91:95] = torch.tensor([-20.0, 20.0, -20.0, 20.0]).exp()
    advantages = torch.randn(500, generator=generator) + offset
    advantages[::9] = 0.0
    advantages[91:95] = torch.tensor([1.0, 1.0, -1.0, -1e-7])
    config = BapoConfig(statistic=statistic)
    found = search_bounds(bapo_sums(ratios, advantages, config).numpy(), config)
    low, high, share = loop(ratios, advantages, config)
    assert (found.low, found.high) == (low, high)
    assert found.share == pytest.approx(share, rel=1e-6)


def test_sums_add_up_over_any_cut():
    config = BapoConfig()
    whole = bapo_sums(RATIOS, ADVANTAGES, config)
    parts = [
        bapo_sums(RATIOS[part], ADVANTAGES[part], config)
        for part in (slice(0, 1), slice(1, 1), slice(1, 6), slice(6, None))
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-15, atol=0.0)
    assert len(whole) == num_bapo_sums(config) == 2 * (37 + 1) + 2 * (16 + 1)


@pytest.mark.parametrize(
    ("advantages", "bounds", "share"),
    [
        ([0.0] * 10, (0.6, 1.2), math.nan),
        ([1.0] * 10, (0.6, 1.2), 1.0),
        ([-1.0] * 10, (0.9, 3.0), 0.0),
    ],
    ids=["no-signal", "all-positive", "all-negative"],
)
def test_one_sided_batches(advantages, bounds, share):
    """With an unreachable target the search ends at the grid's end with a share below it."""
    config = BapoConfig(statistic="share")
    sums = bapo_sums(RATIOS, torch.tensor(advantages), config)
    found = search_bounds(sums.numpy(), config)
    assert (found.low, found.high) == bounds
    assert found.share == pytest.approx(share, nan_ok=True)


def test_edges_do_not_accumulate_rounding():
    """0.6 + 15 x 0.02 is 0.9: added step by step it would end below, or one step short."""
    config = BapoConfig()
    assert (len(config.low_edges), len(config.high_edges)) == (16, 37)
    assert (config.low_edges[-1], config.high_edges[-1]) == (0.9, 3.0)
    alone = BapoConfig(low=(0.8, 0.8, 0.02))
    assert alone.low_edges.tolist() == [0.8]


def test_objective_clips_at_bounds():
    config = BapoConfig(statistic="share")
    found = search_bounds(bapo_sums(RATIOS, ADVANTAGES, config).numpy(), config)
    objective = found.put_into(PolicyObjective(gate="bapo", dual_clip=3.0))
    assert 1.0 - objective.clip_low == pytest.approx(0.6, abs=1e-15)
    assert 1.0 + objective.clip_high == 2.0
    assert (objective.gate, objective.dual_clip) == ("bapo", 3.0)


def test_share_is_of_the_loss():
    """Without loss weights the long second group alone decides: 210 of 2,020 tokens, 0.104."""
    advantages = torch.tensor([1.0] * 10 + [-1.0] * 10 + [1.0] * 200 + [-1.0] * 1800)
    weights = torch.tensor([1 / 40] * 20 + [1 / 4000] * 2000)
    for statistic in ("share", "gradient_share", "official"):
        config = BapoConfig(statistic=statistic, target_share=0.2)
        sums = bapo_sums(torch.ones(2020), advantages * weights, config)
        assert search_bounds(sums.numpy(), config).share_before == pytest.approx(0.30, rel=1e-6)


def test_dual_clip_bounds_negative_tokens():
    """The loss of a negative token with r = 10 and a dual clip of 3 is 3, and its gradient 0."""
    ratios, advantages = torch.tensor([1.0, 10.0, 2.0]), torch.tensor([1.0, -1.0, -1.0])
    for statistic, share in (("share", 1 / 6), ("official", 1 / 6), ("gradient_share", 1 / 3)):
        config = BapoConfig(statistic=statistic, target_share=0.1)
        sums = bapo_sums(ratios, advantages, config, dual_clip=3.0)
        assert search_bounds(sums.numpy(), config).share == pytest.approx(share, rel=1e-6)


def test_default_stops_where_no_negative_token_has_a_gradient():
    """The share of all tokens never reaches the target here and moves both bounds to their ends."""
    ratios = torch.tensor([1.0, 0.5, 0.5, 0.5])
    advantages = torch.tensor([1.0, -1.0, -1.0, -1.0])
    found = {}
    for name, config in {"default": BapoConfig(), "share": BapoConfig(statistic="share")}.items():
        found[name] = search_bounds(bapo_sums(ratios, advantages, config).numpy(), config)
    assert (found["default"].low, found["default"].high) == (0.6, 1.2)
    assert found["default"].share == 1.0
    assert (found["share"].low, found["share"].high) == (0.9, 3.0)
    assert found["share"].share == pytest.approx(0.270, abs=5e-4)
