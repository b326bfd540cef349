"""Every objective under every split, with responses that are masked as a whole or in part."""

from typing import Any

import numpy as np
import pytest

from megadapo.algorithm.objective import PolicyObjective
from megadapo.data.batch import PackedBatch
from megadapo.data.group import NO_VERSION
from tests.support.runs.step_results import area
from tests.support.trainer.batches import RAGGED, random_texts, signed_batch
from tests.support.trainer.definition import BAPO, loss_and_gradients
from tests.support.trainer.gradients import assert_close_by_block, assert_same
from tests.support.trainer.probes import (
    Gradients,
    gradients_by_objective,
    train,
    updates_with_texts,
)
from tests.support.trainer.ranks import OVERLAP, Ranks, layout, with_marks

CASES = {
    "gspo": PolicyObjective(ratio="sequence", clip_low=0.01, clip_high=0.01),
    "gspo-soft": PolicyObjective(ratio="sequence", gate="soft"),
    "bapo": PolicyObjective(gate="bapo"),
    "sapo": PolicyObjective(gate="soft"),
    "cispo": PolicyObjective(gate="weight", weight_max=1.05),
    "clip-cov": PolicyObjective(gate="clip_cov", cov_share=0.2, cov_low=0.0, cov_high=0.5),
    "kl-cov": PolicyObjective(gate="kl_cov", cov_share=0.1, cov_coef=0.5),
    "no-gate": PolicyObjective(gate="none"),
    "penalty": PolicyObjective(gate="none", old_kl_coef=0.7),
    "reinforce": PolicyObjective(ratio="none", gate="none", entropy_coef=0.1),
    "kl": PolicyObjective(kl_coef=0.5, kl_gradient="corrected-k3", clip_high=0.05, dual_clip=1.1),
}
TEXT_LENGTHS = [2, 77, 3, 40, 130, 9]
LAYOUTS = with_marks(
    ["tp2-pp2-sp"], slow=["cp2-dp2-small"], full=("one", "tp2", "pp2", "cp2-tp2-sp")
)


def make_batch(num_mini_batches: int = 1) -> PackedBatch:
    batch = signed_batch(RAGGED, num_mini_batches=num_mini_batches)
    batch.loss_weights[batch.cu_seqlens[3] : batch.cu_seqlens[4]] = 0.0
    first = batch.cu_seqlens[7] + batch.prompt_lengths[7]
    output = slice(first + 10, first + 25)
    batch.loss_weights[output] = 0.0
    batch.logprobs_rollout[output] = np.nan
    batch.policy_versions[output] = NO_VERSION
    return batch


def measure(ranks: Ranks, **layout: Any) -> dict[str, Gradients]:
    arguments = (make_batch(), CASES, random_texts(TEXT_LENGTHS))
    how = {"objective": CASES["bapo"], "bapo": BAPO, **layout}
    return ranks.on("qwen2-tied", gradients_by_objective, *arguments, **how)[0]


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> dict[str, Gradients]:
    """One rank, one micro-batch."""
    return measure(ranks, tokens_per_micro_batch=100_000)


def test_loss_and_gradients_equal_the_definition(models, reference):
    """In float64 with a dense transformers model; every case must give numbers of its own."""
    batch = make_batch()
    for name, objective in CASES.items():
        loss, by_name = loss_and_gradients(models / "qwen2-tied", batch, objective)
        assert reference[name].loss == pytest.approx(loss, rel=1e-5), name
        assert_close_by_block(reference[name].by_name, by_name, 1e-5)
    norms = [round(found.grad_norm, 5) for found in reference.values()]
    assert len(set(norms)) == len(reference), "two cases that give the same are no two tests"


def test_pretraining_loss_adds_to_the_objective(models, reference):
    """It has temperature 1 for every objective, and is a mean over pretraining tokens."""
    folder, texts = models / "qwen2-tied", random_texts(TEXT_LENGTHS)
    likelihood = PolicyObjective(ratio="none", gate="none")
    loss, by_name = loss_and_gradients(folder, texts, likelihood)
    assert reference["texts"].loss == pytest.approx(loss, rel=1e-6)
    assert_close_by_block(reference["texts"].by_name, by_name, 1e-5)
    own, own_by_name = loss_and_gradients(folder, make_batch())
    both = {name: gradient + by_name[name] for name, gradient in own_by_name.items()}
    assert reference["ptx"].loss == pytest.approx(own + loss, rel=1e-6)
    assert_close_by_block(reference["ptx"].by_name, both, 1e-5)


@pytest.mark.parametrize("split", LAYOUTS)
def test_split_keeps_loss_and_gradient(ranks, reference, split):
    """An advantage that moves by a token, or to another sequence, changes every gradient."""
    found = measure(ranks, **layout(split))
    for name, gradients in found.items():
        assert_same(gradients, reference[name])


def steps(ranks: Ranks, **settings: Any) -> list[list[dict[str, Any]]]:
    """Two steps of three updates each, as every rank reports them."""
    return [steps for steps, _ in ranks.on("qwen2-tied", train, make_batch(3), 2, **settings)]


def test_bounds_are_searched_over_all_ranks(ranks):
    """No bounds reach the share, so each search goes to its grid's end."""
    bapo = BAPO.model_copy(update={"target_share": 0.9})
    options = {"objective": CASES["bapo"], "bapo": bapo}
    ((alone, _),) = steps(ranks, **options)
    layout = {"data": 2, "context": 2, "tokens_per_micro_batch": 64, **OVERLAP}
    split = steps(ranks, **layout, **options)
    for found, _ in [(alone, None), *split]:
        bounds = area(found, "bapo")
        assert found["policy/ratio_first_max_error"] == 0.0
        assert bounds["clip_high"] == pytest.approx(1.15)
        assert bounds["share_min"] == pytest.approx(alone["bapo/share_min"], rel=1e-3)
        assert bounds == area(split[0][0], "bapo") or found is alone
    assert 0.0 < alone["bapo/share_before"] < 0.9


@pytest.mark.parametrize("gate", ["clip-cov", "kl-cov"])
def test_tokens_are_chosen_over_all_ranks(ranks, gate):
    """Per rank the share would be of fewer tokens; later updates need the log-probs of their own
    weights."""
    options = {"objective": CASES[gate]}
    ((alone, later),) = steps(ranks, **options)
    layout = {"data": 2, "context": 2, "tokens_per_micro_batch": 64, **OVERLAP}
    split = steps(ranks, **layout, **options)
    for found, _ in [(alone, None), *split]:
        assert found["policy/ratio_first_max_error"] == 0.0
        for name in ("policy/chosen_fraction", "tokens/trained"):
            assert found[name] == alone[name]
        for name in ("policy/loss", "policy/grad_norm"):
            assert found[name] == pytest.approx(alone[name], rel=1e-4)
    assert alone["policy/chosen_fraction"] == pytest.approx(CASES[gate].cov_share, rel=0.1)
    assert later["policy/loss"] != alone["policy/loss"]


@pytest.mark.slow
def test_pretraining_data_keeps_the_objectives_metrics(ranks):
    """Their loss goes down and is reported alone; one that is measured only moves no bit."""
    free, costly = (random_texts(TEXT_LENGTHS, [5], [11, 9], coef=coef) for coef in (0.0, 5.0))
    plain, measured, mixed = (
        ranks.on("qwen2-tied", updates_with_texts, make_batch(3), texts, 3)[0]
        for texts in (None, free, costly)
    )
    nothing = {"pretraining/loss": None, "pretraining/tokens": None}
    for (found, weights), (alone, own_weights) in zip(measured, plain, strict=True):
        assert found | nothing == alone == alone | nothing
        assert found["pretraining/tokens"] == sum(TEXT_LENGTHS) + 25 - 9
        assert all((weights[name] == own_weights[name]).all() for name in own_weights)
    losses, untrained = (
        [found["pretraining/loss"] for found, _ in steps] for steps in (mixed, measured)
    )
    assert losses[0] < untrained[0] and losses[2] < losses[1] < untrained[2]
    assert mixed[0][0]["policy/ratio_first_max_error"] == 0.0


def test_the_first_sequence_ratio_is_one(ranks):
    """Measured by the extra pass of the head, whose bits must be the loss's; later ones are not."""
    objective = PolicyObjective(ratio="sequence", clip_low=3e-4, clip_high=4e-4)
    for found in steps(ranks, tensor=2, sequence=True, objective=objective)[0]:
        assert found["policy/ratio_first_max_error"] == 0.0
        assert abs(found["policy/ratio_mean"] - 1.0) > 1e-6
        assert found["policy/clip_low_fraction"] + found["policy/clip_high_fraction"] > 0.0
        assert set(area(found, "bapo").values()) == {None}
        assert np.isfinite(found["policy/loss"])
