"""Fresh and stale responses in one batch: each way to weight them, under every split."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from megadapo.algorithm.importance import ImportanceConfig
from megadapo.data.batch import PackedBatch
from tests.support.runs.step_results import area
from tests.support.trainer.batches import RAGGED, random_batch, stale_batch
from tests.support.trainer.definition import loss_and_gradients
from tests.support.trainer.gradients import assert_close_by_block, assert_same
from tests.support.trainer.probes import (
    Gradients,
    gradients_by_case,
    logprobs,
    train,
    train_with_separate_pass,
)
from tests.support.trainer.ranks import Ranks, layouts, with_marks

PRESENT = 7
CASES = {
    "token-truncate": ImportanceConfig(low=0.5, high=1.5),
    "token-mask": ImportanceConfig(bound="mask", low=0.5, high=1.5),
    "sequence-truncate": ImportanceConfig(level="sequence", low=0.9, high=1.1),
    "sequence-mask": ImportanceConfig(level="sequence", bound="mask", low=0.8, high=1.25),
    "unbounded": ImportanceConfig(bound="none"),
    "all": ImportanceConfig(level="sequence", low=0.9, high=1.1, scope="all"),
    "rollout": ImportanceConfig(stale_logprobs="rollout"),
    "rollout-all": ImportanceConfig(stale_logprobs="rollout", scope="all"),
}
LAYOUTS = layouts("tp2", "cp2-dp2-small", "cp2-pp2", "tp2-pp2-sp")


def measure(ranks: Ranks, **layout: Any) -> dict[str, Gradients]:
    batch = stale_batch(RAGGED, present=PRESENT)
    return ranks.on("qwen2-tied", gradients_by_case, batch, CASES, **layout)[0]


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> dict[str, Gradients]:
    """One rank, one micro-batch."""
    return measure(ranks, tokens_per_micro_batch=100_000)


def test_loss_and_gradients_equal_the_definition(models, reference):
    """In float64 with a dense transformers model; every case must give numbers of its own."""
    batch = stale_batch(RAGGED, present=PRESENT)
    for name, importance in CASES.items():
        loss, by_name = loss_and_gradients(models / "qwen2-tied", batch, importance=importance)
        assert reference[name].loss == pytest.approx(loss, rel=1e-5), name
        assert_close_by_block(reference[name].by_name, by_name, 1e-5)
    losses = [round(found.loss, 5) for found in reference.values()]
    assert len(set(losses)) == len(CASES), "two cases that give the same are no two tests"


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", with_marks(("cp2-dp2-small", "tp2-pp2-sp"), full=("tp2", "cp2-pp2"))
)
def test_split_keeps_loss_and_gradient(ranks, reference, layout):
    found = measure(ranks, **LAYOUTS[layout])
    for name, gradients in found.items():
        assert_same(gradients, reference[name])


def step(ranks: Ranks, batch: PackedBatch, **settings: Any) -> dict[str, Any]:
    """One step's result on a rank; every rank has the same."""
    run = partial(train, policy_version=PRESENT)
    return ranks.on("qwen2-tied", run, batch, 1, **settings)[0][0][0]


def test_step_measures_staleness(ranks):
    batch = stale_batch(RAGGED, present=PRESENT)
    trained = np.isfinite(batch.logprobs_rollout)
    gaps = PRESENT - batch.policy_versions[trained]
    proximal = ranks.on("qwen2-tied", logprobs, batch)[0][trained]
    difference = np.abs(proximal - batch.logprobs_rollout[trained])
    ratios = np.exp(proximal - batch.logprobs_rollout[trained])[gaps > 0]
    found = step(ranks, batch, context=2, importance=CASES["token-truncate"])
    staleness = area(found, "staleness")
    assert staleness["token_share"] == pytest.approx((gaps > 0).mean())
    assert (staleness["mean"], staleness["max"]) == (pytest.approx(gaps.mean()), 3)
    assert staleness["logprob_drift_mean"] == pytest.approx(difference[gaps > 0].mean(), rel=1e-4)
    assert staleness["logprob_drift_max"] == pytest.approx(difference[gaps > 0].max(), rel=1e-4)
    outside = ((ratios < 0.5) | (ratios > 1.5)).mean()
    assert 0.0 < staleness["weight_truncated_share"] == pytest.approx(outside)
    assert staleness["weight_masked_share"] == 0.0
    # parity stays about what the present weights sampled
    assert found["parity/logprob_abs_max"] == pytest.approx(difference[gaps == 0].max(), rel=1e-4)
    masked = step(ranks, batch, importance=CASES["token-mask"])
    assert masked["staleness/weight_masked_share"] == staleness["weight_truncated_share"]


@pytest.mark.parametrize("name", ["token-truncate", "rollout"])
def test_the_first_ratio_of_recomputed_tokens_is_one(ranks, name):
    """Stale tokens against the rollout's log-probs are not at 1, and must not hide who is."""
    found = step(ranks, stale_batch(RAGGED, present=PRESENT), importance=CASES[name])
    assert found["policy/ratio_first_max_error"] == 0.0
    assert (abs(found["policy/ratio_mean"] - 1.0) > 0.01) == (name == "rollout")


def test_stale_rules_change_no_bit_of_a_fresh_batch(ranks):
    batch = random_batch(RAGGED, num_mini_batches=2)
    _, expected = ranks.on("qwen2-tied", train, batch, 1)[0]
    masked = CASES["sequence-mask"]
    (found,), weights = ranks.on("qwen2-tied", train, batch, 1, importance=masked)[0]
    assert found["staleness/token_share"] == 0.0
    assert found["staleness/weight_masked_share"] is None
    assert all(weights[name].tobytes() == expected[name].tobytes() for name in weights)


def test_leaving_out_stale_tokens_keeps_other_weights(ranks):
    batch, without = stale_batch(RAGGED, present=PRESENT), stale_batch(RAGGED, present=PRESENT)
    without.loss_weights[without.policy_versions != PRESENT] = 0.0
    left_out = ImportanceConfig(stale_logprobs="none")
    found = step(ranks, batch, importance=left_out)
    expected = step(ranks, without)
    for name in ("policy/loss", "tokens/trained", "policy/grad_norm"):
        assert found[name] == expected[name], name
    assert found["staleness/token_share"] > 0.3
    assert found["staleness/logprob_drift_mean"] is None


@pytest.mark.parametrize(
    ("name", "layout"), [("all", {}), ("sequence-mask", LAYOUTS["cp2-pp2"]), ("rollout", {})]
)
def test_shared_pass_changes_no_bit(ranks, name, layout):
    """The update's own pass would be wrong if weights, probe or ratios read other log-probs."""
    batch = stale_batch(RAGGED, present=PRESENT)
    settings = {"importance": CASES[name], "passes": 2, "tokens_per_micro_batch": 64, **layout}
    runs = [
        ranks.on("qwen2-tied", partial(run, policy_version=PRESENT), batch, 1, **settings)[0]
        for run in (train, train_with_separate_pass)
    ]
    (shared, weights), (separate, expected) = runs
    assert shared == separate
    assert all((weights[key] == value).all() for key, value in expected.items())
