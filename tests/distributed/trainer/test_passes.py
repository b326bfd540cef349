"""Several passes over a batch: old policies that move, wrong orders, limits without effect."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from megadapo.algorithm.bapo import BapoConfig
from megadapo.algorithm.importance import ImportanceConfig
from megadapo.algorithm.mini_batches import update_order
from megadapo.algorithm.objective import PolicyObjective
from megadapo.algorithm.reference import policy_loss
from megadapo.data.batch import PackedBatch
from megadapo.trainer.config import ADAM_EPS, OptimizerConfig
from tests.support.trainer import critics
from tests.support.trainer.batches import RAGGED, random_batch, random_texts, stale_batch
from tests.support.trainer.definition import load_wide, one_thread, sequence_logprobs, sequences
from tests.support.trainer.probes import train, updates_with_texts
from tests.support.trainer.ranks import Ranks, layout, with_marks

BATCH = random_batch(RAGGED, num_mini_batches=2)
LAYOUTS = {"dapo": ("tp2-sp", "cp2-pp2-small"), "gspo": ("tp2-sp",), "bapo": ("dp2",)}
"""Objective -> layouts: the order of updates does not depend on the objective."""
OBJECTIVES: dict[str, dict[str, Any]] = {
    "dapo": {"objective": PolicyObjective(clip_low=0.004, clip_high=0.005)},
    "gspo": {"objective": PolicyObjective(ratio="sequence", clip_low=3e-4, clip_high=4e-4)},
    "bapo": {
        "objective": PolicyObjective(gate="bapo"),
        "bapo": BapoConfig(low=(0.98, 0.99, 0.005), high=(1.01, 1.02, 0.005)),
    },
}


def parts_of(batch: PackedBatch, number: int) -> list[tuple[slice, torch.Tensor]]:
    return list(sequences(replace(batch, mini_batches=(batch.mini_batches[number],))))


@one_thread()
def definition(folder, batch: PackedBatch, order: list[int]) -> tuple[list[float], list[float]]:
    """Loss and divergence of each update in fp64: old log-probs are those before the first one."""
    model = load_wide(folder)
    config = OptimizerConfig(lr=1e-3, weight_decay=0.01, grad_clip=1.0)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=1e-3, betas=config.betas, eps=ADAM_EPS, weight_decay=0.01
    )
    with torch.no_grad():
        old = {
            number: [sequence_logprobs(model, tokens) for _, tokens in parts_of(batch, number)]
            for number in set(order)
        }
    losses, divergences = [], []
    for number in order:
        parts = parts_of(batch, number)
        logprobs = torch.cat([sequence_logprobs(model, tokens) for _, tokens in parts])
        places = np.concatenate([np.arange(where.start, where.stop) for where, _ in parts])
        advantages, weights = (
            torch.from_numpy(values[places]).double()
            for values in (batch.advantages, batch.loss_weights)
        )
        before = torch.cat(old[number])
        loss = policy_loss(
            logprobs,
            before,
            advantages,
            weights,
            torch.tensor([0, *np.cumsum([len(tokens) - 1 for _, tokens in parts])]),
            objective=OBJECTIVES["dapo"]["objective"],
        )
        change = (logprobs - before).detach()[weights != 0]
        divergences.append(float((change.expm1() - change).mean()))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses, divergences


def test_passes_equal_the_definition(ranks: Ranks, models):
    """Old log-probs computed again in each pass would make the divergence several times smaller."""
    order = update_order(2, 3, seed=0, step=1)
    losses, divergences = definition(models / "qwen2-tied", BATCH, order)
    (((found,), _),) = ranks.on("qwen2-tied", train, BATCH, 1, passes=3, **OBJECTIVES["dapo"])
    assert found["policy/loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    tokens = [sum(len(batch) for batch in (BATCH.mini_batches[number],)) for number in order]
    assert len(set(tokens)) == 1, "the mean below is over updates of one size"
    weights = [
        sum(int((BATCH.loss_weights[where] != 0).sum()) for where, _ in parts_of(BATCH, number))
        for number in order
    ]
    expected = np.average(divergences, weights=weights)
    assert found["policy/approx_kl"] == pytest.approx(expected, rel=1e-3)
    assert divergences[0] == 0.0 < divergences[2] and found["policy/ratio_first_max_error"] == 0.0
    assert found["policy/clip_high_fraction"] > 0.0 and found["policy/left_out_updates"] is None


def test_step_counts_its_tokens_once(ranks: Ranks):
    one, three = (ranks.on("qwen2-tied", train, BATCH, 1, passes=n)[0][0][0] for n in (1, 3))
    assert one["tokens/trained"] == three["tokens/trained"] == int((BATCH.loss_weights != 0).sum())
    assert three["policy/approx_kl"] > one["policy/approx_kl"] > 0.0


@pytest.mark.parametrize("name", with_marks(["dapo"], slow=("gspo", "bapo")))
def test_layouts_agree(ranks: Ranks, name):
    """An order drawn by each rank for itself would mix gradients of different mini-batches."""
    how = {"passes": 3, "lr": 1e-4} | OBJECTIVES[name]
    ((alone, weights),) = ranks.on("qwen2-tied", train, BATCH, 2, **how)
    for split in LAYOUTS[name]:
        results = ranks.on("qwen2-tied", train, BATCH, 2, **how, **layout(split))
        for metrics, found in results:
            assert metrics == results[0][0]
            for one, other in zip(metrics, alone, strict=True):
                for key in ("policy/loss", "policy/grad_norm", "policy/ratio_mean"):
                    assert one[key] == pytest.approx(other[key], rel=1e-5, abs=1e-6), key
            for key, weight in weights.items():
                np.testing.assert_allclose(found[key], weight, rtol=0, atol=5e-6, err_msg=key)


def test_resumed_step_takes_the_same_order(ranks: Ranks, tmp_path):
    how = {"passes": 4, "seed": 7}
    batch = random_batch(RAGGED, num_mini_batches=4)
    saving = partial(train, save=tmp_path / "saved", save_after=2)
    ((whole, weights),) = ranks.on("qwen2-tied", saving, batch, 3, **how)
    loading = partial(train, load=tmp_path / "saved", first_step=3)
    ((again, found),) = ranks.on("qwen2-tied", loading, batch, 1, **how)
    assert again[0] == whole[2]
    assert all(found[name].tobytes() == weights[name].tobytes() for name in weights)


@pytest.mark.parametrize("split", ["one", "dp2-pp2"])
def test_divergence_ends_the_updates_on_all_ranks(ranks: Ranks, split):
    """A rank that continues alone would wait for the others forever."""
    results = ranks.on("qwen2-tied", train, BATCH, 1, passes=3, max_kl=1e-12, **layout(split))
    first = replace(BATCH, mini_batches=BATCH.mini_batches[:1])
    expected = ranks.on("qwen2-tied", train, first, 1, **layout(split))[0][1]
    for (metrics,), weights in results:
        assert metrics["policy/left_out_updates"] == 5 and metrics["policy/skipped_updates"] == 0
        assert metrics["policy/approx_kl"] > 1e-12
        assert all(weights[name].tobytes() == expected[name].tobytes() for name in weights)
        num_tokens = sum(
            BATCH.loss_weights[where].astype(bool).sum() for where, _ in parts_of(BATCH, 0)
        )
        assert metrics["tokens/trained"] == num_tokens
    (((loose,), _),) = ranks.on("qwen2-tied", train, BATCH, 1, passes=3, max_kl=1e3)
    assert loose["policy/left_out_updates"] == 0


def test_stale_tokens_are_no_divergence_of_the_updates(ranks: Ranks):
    """Against the engine's log-probs, steps would be left out before the policy has moved."""
    old, importance = stale_batch(RAGGED), ImportanceConfig(stale_logprobs="rollout")
    function = partial(train, policy_version=old.policy_versions.max())
    (((metrics,), _),) = ranks.on("qwen2-tied", function, old, 1, importance=importance)
    assert metrics["policy/approx_kl"] == 0.0 and metrics["staleness/token_share"] > 0.0


def test_critic_passes_over_fixed_targets_and_goes_on(ranks: Ranks):
    """Targets computed again would chase the critic; one that stops with the policy learns less."""
    found = {}
    for name, how in {
        "one": {},
        "four": {"passes": 4},
        "stopped": {"passes": 4, "max_kl": 1e-12},
    }.items():
        ((steps, _, weights),) = ranks.on(
            "qwen2-tied", critics.train, BATCH, range(1, 2), critic={}, **how
        )
        found[name] = (steps[0], weights)
    assert found["four"][0]["critic/loss"] < found["one"][0]["critic/loss"]
    four, stopped = found["four"], found["stopped"]
    assert stopped[0]["policy/left_out_updates"] == 7
    for name, weight in four[1].items():
        assert stopped[1][name].tobytes() == weight.tobytes(), name


def test_each_pass_has_texts_of_its_own(ranks: Ranks):
    texts = random_texts([20], [30], [40], [50])
    ((steps),) = ranks.on("qwen2-tied", updates_with_texts, BATCH, texts, 1, passes=2)
    assert steps[0][0]["pretraining/tokens"] == 20 + 30 + 40 + 50 - 4
