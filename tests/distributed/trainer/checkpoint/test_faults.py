"""A number that is not finite, on one rank only, must leave every rank's weights alone."""

import math

import numpy as np
import pytest

from megadapo.algorithm.objective import PolicyObjective
from tests.support.trainer.batches import RAGGED, random_batch
from tests.support.trainer.probes import (
    recorded_update,
    steps_with_losses,
    train,
    update_with_fault,
)
from tests.support.trainer.ranks import layouts

IN_REWARD = PolicyObjective(kl_coef=0.3, kl_in="reward", kl_value="k1")
LAYOUTS = layouts("dp2", "dp2-overlap", "tp2", "pp2-dp2")


@pytest.mark.parametrize(
    ("layout", "where"),
    [*((name, "activation") for name in LAYOUTS), ("dp2-overlap", "gradient"), ("tp2", "gradient")],
)
def test_non_finite_on_one_rank_skips_on_all(ranks, layout, where):
    batch = random_batch(RAGGED)
    for report in ranks.on("qwen2-tied", update_with_fault, batch, where, **LAYOUTS[layout]):
        assert report["faulty"]["policy/skipped_updates"] == 1
        assert math.isnan(report["faulty"]["policy/grad_norm"])
        assert report["unchanged"], "weights, masters or moments moved in a skipped update"
        assert report["healthy"]["policy/skipped_updates"] == 0
        assert report["changed_after"] and report["finite"]


@pytest.mark.parametrize(("where", "layout"), [("activation", "dp2"), ("value", "tp2")])
def test_non_finite_advantages_skip_the_update(ranks, layout, where):
    """A KL divergence in the rewards, or a critic, carries one rank's NaN to every advantage."""
    changes = {"objective": IN_REWARD, "critic": {} if where == "value" else None}
    for report in ranks.on(
        "qwen2-tied", update_with_fault, random_batch(RAGGED), where, **changes, **LAYOUTS[layout]
    ):
        assert report["faulty"]["policy/skipped_updates"] == 1 and report["unchanged"]
        assert report["healthy"]["policy/skipped_updates"] == 0
        assert report["changed_after"] and report["finite"]
        of_critic = [report[step].get("critic/skipped_updates") for step in ("faulty", "healthy")]
        assert of_critic == ([1, 0] if where == "value" else [None, None])


def test_non_finite_loss_skips_the_update(ranks):
    """A guard that looked at the gradient norm alone would train on."""
    losses = [math.nan, math.inf, -math.inf, 0.5]
    for answers in ranks.on("qwen2-tied", steps_with_losses, random_batch(RAGGED), losses, data=2):
        assert [norm is not None for norm, _ in answers] == [False, False, False, True]
        assert [changed for _, changed in answers] == [False, False, False, True]


def test_tokens_without_engine_logprob_are_dropped_and_counted(ranks):
    """Filling them with 0.0 would claim probability 1; the rest must train as if they were gone."""
    batch = random_batch(RAGGED)
    holes = np.flatnonzero(np.isfinite(batch.logprobs_rollout))[::7]
    batch.logprobs_rollout[holes] = np.nan
    without = random_batch(RAGGED)
    without.loss_weights[holes] = 0.0
    ((results, weights),) = ranks.on("qwen2-tied", train, batch, 1)
    ((expected, expected_weights),) = ranks.on("qwen2-tied", train, without, 1)
    (counted,) = ranks.on("qwen2-tied", recorded_update, batch, [])
    assert counted.num_dropped_tokens == len(holes)
    assert results[0]["tokens/trained"] == expected[0]["tokens/trained"]
    assert results[0]["policy/loss"] == expected[0]["policy/loss"]
    assert all(np.array_equal(weights[name], expected_weights[name]) for name in weights)


def test_mini_batch_without_loss_works(ranks):
    """All responses left out (overlong filtering): a defined, finite result on every rank."""
    batch = random_batch([30, 20])
    batch.loss_weights[:] = 0.0
    for results, _ in ranks.on("qwen2-tied", train, batch, 1, tensor=2, sequence=True):
        assert results[0]["tokens/trained"] == 0
        assert results[0]["policy/loss"] == 0.0
        assert results[0]["policy/skipped_updates"] == 0
