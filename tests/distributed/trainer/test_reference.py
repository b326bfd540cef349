"""The KL divergence to a reference policy, whose weights are the policy's times a factor."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megadapo.algorithm.advantages import advantages_with_kl
from megadapo.algorithm.config import ReferenceConfig
from megadapo.algorithm.objective import PolicyObjective
from megadapo.data.batch import PackedBatch
from tests.support.runs.step_results import FIRST_KL, area
from tests.support.trainer.batches import RAGGED, random_batch
from tests.support.trainer.definition import load_wide, loss_and_gradients, sequence_logprobs
from tests.support.trainer.gradients import assert_close_by_block, assert_same
from tests.support.trainer.probes import Gradients, load_refusal, train
from tests.support.trainer.ranks import Ranks, layouts, with_marks
from tests.support.trainer.reference_probes import (
    advantages_by_rule,
    follow,
    gradients_by_estimator,
)

SCALE = 0.9
"""Below 1: larger weights make a model that rounding sways more."""
FULL = pytest.mark.full
ESTIMATORS = {
    "k1": ("k1", "k1"),
    "k2": ("k2", "k2"),
    "k3": ("k3", "k3"),
    "corrected-k3": ("corrected-k3", "corrected-k3"),
    "k3-with-k2's-gradient": ("k3", "k2"),
}
CASES = {
    name: PolicyObjective(kl_coef=0.5, kl_value=value, kl_gradient=gradient)
    for name, (value, gradient) in ESTIMATORS.items()
}
LAYOUTS = layouts("tp2-sp", "cp2-dp2-small", "vpp2-dp2-overlap", "pp2-large")
IN_LOSS = PolicyObjective(kl_coef=0.5)
IN_REWARD = PolicyObjective(kl_coef=0.3, kl_in="reward", kl_value="k1")
RULES = ["grpo", "rloo", "reinforce++"]
REFRESHED = ReferenceConfig(refresh_every=2)


def step_batch(**changes: Any) -> PackedBatch:
    """Responses in groups of four."""
    return replace(random_batch(RAGGED, **changes), group_sizes=np.array([4, 4, 4]))


def run(ranks: Ranks, function: Callable[..., Any], model: str, *args: Any, **layout: Any) -> Any:
    """Return rank 0's answer, or all answers for a function of parts."""
    answers = ranks.on(model, function, *args, **{"objective": IN_LOSS, **layout})
    return answers if function is advantages_by_rule else answers[0]


@pytest.fixture(scope="module")
def one_rank(ranks: Ranks) -> dict[str, dict[str, Gradients]]:
    """One rank, one micro-batch."""
    run_one = partial(run, ranks, gradients_by_estimator, tokens_per_micro_batch=100_000)
    return {
        name: run_one(name, random_batch(RAGGED), CASES, SCALE)
        for name in ("qwen2-tied", "deep-untied")
    }


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_the_definition(models, one_rank, case):
    """In float64 with two dense transformers models; ratios are not 1."""
    loss, by_name = loss_and_gradients(
        models / "qwen2-tied", random_batch(RAGGED), CASES[case], scale=SCALE
    )
    found = one_rank["qwen2-tied"][case]
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert_close_by_block(found.by_name, by_name, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", with_marks([*LAYOUTS][:3], full=["pp2-large"]))
def test_split_keeps_loss_and_gradient(ranks, one_rank, layout):
    model = "deep-untied" if "virtual" in LAYOUTS[layout] else "qwen2-tied"
    found = run(
        ranks, gradients_by_estimator, model, random_batch(RAGGED), CASES, SCALE, **LAYOUTS[layout]
    )
    for case, gradients in found.items():
        assert_same(gradients, one_rank[model][case])


@pytest.fixture(scope="module")
def k1_by_hand(models: Path) -> np.ndarray:
    """[N] of the response tokens in float64, as the probes shift the policy's log-probs."""
    folder, batch, parts = models / "deep-untied", step_batch(), []
    policy, reference = load_wide(folder, SCALE), load_wide(folder)
    for index, prompt_length in enumerate(batch.prompt_lengths):
        start, stop = batch.cu_seqlens[index], batch.cu_seqlens[index + 1]
        tokens = torch.from_numpy(batch.tokens[start:stop])
        with torch.no_grad():
            gap = sequence_logprobs(policy, tokens) - sequence_logprobs(reference, tokens)
        shift = 0.15 * np.sin(np.arange(start + 1, stop))
        parts.append((gap.numpy() + shift)[prompt_length - 1 :])
    return np.concatenate(parts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp2-sp", "cp2-dp2-small", "vpp2-dp2-overlap"])
def test_kl_in_reward_is_the_same_under_every_split(ranks, k1_by_hand, name):
    """A sum over one rank's tokens, or over one update's, would compare unequal responses."""
    batch, layout = step_batch(num_mini_batches=2), {"objective": IN_REWARD, **LAYOUTS[name]}
    parts = run(ranks, advantages_by_rule, "deep-untied", batch, RULES, SCALE, **layout)
    trained = batch.loss_weights != 0
    num_tokens = np.diff(batch.cu_seqlens) - batch.prompt_lengths
    for rule in RULES:
        expected = advantages_with_kl(
            batch.rewards,
            k1_by_hand,
            num_tokens,
            batch.group_sizes,
            kl_coef=0.3,
            rule=rule,
            normalize_by_std=True,
        )
        known = np.full(len(batch.tokens), np.nan)
        for part in parts:
            np.copyto(known, part[rule], where=np.isfinite(part[rule]))
        np.testing.assert_allclose(known[trained], expected, atol=2e-5)


def test_update_uses_rewards_with_kl(ranks):
    """On one rank and on four; without the penalty the batch's own advantages would hold."""
    batch = step_batch(num_mini_batches=2)
    four = {"pipeline": 2, "data": 2, "tokens_per_micro_batch": 64}
    one, split = (
        run(ranks, follow, "deep-untied", batch, 2, objective=IN_REWARD, **layout)
        for layout in ({}, four)
    )
    for step, truth in zip(split, one, strict=True):
        for name, weight in truth[1].items():
            # a weight whose gradient is nothing but rounding goes either way in AdamW, so not the
            # largest difference of a tensor
            assert np.sqrt(np.mean((step[1][name] - weight) ** 2)) < 2e-6, name
    first, second = one[1][0], one[2][0]
    assert area(first, "kl") == FIRST_KL | {"coef": 0.3} and second["kl/max"] > 0.0


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=FULL)])
def test_first_kl_is_zero_and_changes_no_update(ranks, dtype):
    """Equal weights in equal shapes give equal bits; and the policy comes back bit by bit."""
    layout = {"tensor": 2, "pipeline": 2, "sequence": True, "tokens_per_micro_batch": 100}
    batch = random_batch(RAGGED)
    seen = run(ranks, follow, "qwen2-tied", batch, 2, dtype=dtype, **layout)
    (expected,), trained = ranks.on("qwen2-tied", train, batch, 1, dtype=dtype, **layout)[0]
    assert area(seen[1][0], "kl") == FIRST_KL | {"coef": 0.5}
    assert seen[1][0] | {name: None for name in expected if name.startswith("kl/")} == expected
    for name, weight in trained.items():
        assert seen[1][1][name].tobytes() == weight.tobytes(), name
    assert 0.0 < seen[2][0]["kl/mean"] < seen[2][0]["kl/max"]
    assert seen[2][0]["policy/ratio_first_max_error"] == 0.0


def test_reference_is_refreshed_after_every_second_step(ranks):
    batch = random_batch(RAGGED, num_mini_batches=2)
    seen = run(ranks, follow, "qwen2-tied", batch, 3, reference=REFRESHED, data=2)
    for name, first in seen[0][1].items():
        second = seen[2][1][name]
        for (_, _, found), expected in zip(seen, [first, first, second, second], strict=True):
            assert found[name].tobytes() == expected.tobytes(), name
    assert [result["kl/max"] == 0.0 for result, *_ in seen[1:]] == [True, False, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "sizes", "dtype"),
    [
        ("deep-tied", {"tensor": 2, "context": 2}, "bfloat16"),
        ("qwen3-moe", {"data": 2, "expert": 2}, "float32"),
    ],
    ids=["bf16", "expert-parallel"],
)
def test_reference_resumes_at_any_split(ranks, tmp_path, model, sizes, dtype):
    """Catches a reference rebuilt from the policy, and experts that one rank alone has written."""
    batch = random_batch(RAGGED, num_mini_batches=2)
    usual = {"reference": REFRESHED, "dtype": dtype}
    split = {**sizes, **usual}
    save = partial(follow, save=(3, tmp_path / "saved"))
    (tmp_path / "saved" / "reference").mkdir(parents=True)
    # as another rank's unfinished file, which has its last name before rank 0 looks at it
    (tmp_path / "saved" / "reference" / ".unfinished").symlink_to("moved")
    whole = run(ranks, save, model, batch, 4, **split)
    go_on = partial(follow, load=tmp_path / "saved", first_step=4)
    for layout in (split, {"pipeline": 2, "virtual": 2, "data": 2, **usual}):
        loaded, then = run(ranks, go_on, model, batch, 1, **layout)
        for name, weight in whole[3][2].items():
            assert loaded[2][name].tobytes() == weight.tobytes(), name
        if layout is split:
            assert then[0] == whole[4][0]
            for name, weight in whole[4][2].items():
                assert then[2][name].tobytes() == weight.tobytes(), name


def test_fixed_reference_is_read_from_the_model(ranks, tmp_path):
    """A fixed reference is in no checkpoint, so another kind cannot resume from it."""
    batch, model = random_batch(RAGGED), "qwen2-tied"
    saving = partial(follow, save=(2, tmp_path / "saved"))
    seen = run(ranks, saving, model, batch, 2, data=2)
    assert not (tmp_path / "saved" / "reference").exists()
    again = run(ranks, partial(follow, load=tmp_path / "saved"), model, batch, 0, tensor=2)
    for name, weight in seen[0][1].items():
        assert again[0][2][name].tobytes() == weight.tobytes(), name
        assert again[0][1][name].tobytes() == seen[2][1][name].tobytes(), name
    message = run(ranks, load_refusal, model, tmp_path / "saved", reference=REFRESHED)
    assert "algorithm.reference.refresh_every" in message
