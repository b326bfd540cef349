"""A reference policy that is another model: reverse KL on the policy's own samples."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from megadapo.algorithm.config import ReferenceConfig
from megadapo.algorithm.objective import PolicyObjective
from tests.support.runs.step_results import FIRST_KL, area
from tests.support.trainer.batches import RAGGED, random_batch
from tests.support.trainer.definition import batch_logprobs, loss_and_gradients
from tests.support.trainer.gradients import assert_close_by_block, assert_same
from tests.support.trainer.probes import train
from tests.support.trainer.ranks import layout, with_marks
from tests.support.trainer.reference_probes import gradients_by_estimator

STUDENT = "qwen2-tied"
REVERSE = PolicyObjective(kl_coef=0.5, kl_value="k2", kl_gradient="k2")
KL = {"k2": REVERSE}
CASES = KL | {"k3": PolicyObjective(kl_coef=0.5)}
TEACHERS = {"deeper": ("deep-untied", 1.0), "other-heads-and-rope": ("llama3", 0.7)}
LAYOUTS = {
    "tp2-sp": ("deep-tied", "qwen3"),
    "dp2-small": ("qwen3", "deep-tied"),
    "pp2-cp2": ("qwen3", "deep-tied"),
    "tp2-pp2-sp": ("deep-tied", "qwen3"),
    "vpp2-dp2-overlap": ("deep-tied", "deep-untied"),
}
"""Layout -> policy and teacher, which has half or twice the layers, or two chunks on each rank."""


def taught_by(models, name, **changes):
    """Keys of `settings_for` for a run with this teacher."""
    reference = ReferenceConfig(path=str(models / name))
    return {"objective": REVERSE, "reference": reference, **changes}


@pytest.mark.parametrize("case", TEACHERS)
def test_loss_and_gradients_equal_the_definition(ranks, models, case):
    """In float64; a teacher under the policy's depth, rotary embedding or temperature differs."""
    teacher, temperature = TEACHERS[case]
    how = taught_by(models, teacher, temperature=temperature)
    found = ranks.on(STUDENT, gradients_by_estimator, random_batch(RAGGED), CASES, 1.0, **how)[0]
    for name, objective in CASES.items():
        loss, by_name = loss_and_gradients(
            models / STUDENT,
            random_batch(RAGGED),
            objective,
            teacher=models / teacher,
            temperature=temperature,
        )
        assert found[name].loss == pytest.approx(loss, rel=1e-5)
        assert_close_by_block(found[name].by_name, by_name, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    with_marks(("pp2-cp2", "tp2-pp2-sp", "vpp2-dp2-overlap"), full=("tp2-sp", "dp2-small")),
)
def test_split_keeps_loss_and_gradient(ranks, models, name):
    policy, teacher = LAYOUTS[name]
    run = partial(ranks.on, policy, gradients_by_estimator, random_batch(RAGGED))
    # the estimator of k3 grows with the exponential of a distance, and so does its rounding
    one = run(KL, 1.0, tokens_per_micro_batch=100_000, **taught_by(models, teacher))[0]
    split = run(KL, 1.0, **taught_by(models, teacher, **layout(name)))[0]
    assert_same(split["k2"], one["k2"])


def test_log_probs_of_the_batch_give_the_same_loss(ranks, models):
    """The batch of `megadapo whatif` has them; on one rank and on a last stage of two."""
    batch = random_batch(RAGGED)
    known = batch_logprobs(models / "deep-untied", batch, torch.float64)
    known_batch = replace(batch, logprobs_ref=known.astype(np.float32))
    by_folder = taught_by(models, "deep-untied")
    by_batch = by_folder | {"reference": ReferenceConfig()}
    run = partial(ranks.on, STUDENT, gradients_by_estimator)
    expected = run(batch, CASES, 1.0, **by_folder)[0]
    for split in ({}, layout("pp2-tp2")):
        found = run(known_batch, CASES, 1.0, **by_batch, **split)[0]
        for case, gradients in found.items():
            assert gradients.loss == pytest.approx(expected[case].loss, rel=1e-6)
            assert_close_by_block(gradients.by_name, expected[case].by_name, 1e-5)


@pytest.mark.parametrize("dtype", with_marks(["bfloat16"], full=["float32"]))
def test_teacher_equal_to_the_policy_is_at_distance_zero(ranks, models, dtype):
    """Other shapes of micro-batches, or a head of its own, would round differently."""
    split = layout("tp2-pp2-sp") | {"tokens_per_micro_batch": 100}
    how = taught_by(models, STUDENT, dtype=dtype, **split)
    seen, _ = ranks.on(STUDENT, train, random_batch(RAGGED), 2, **how)[0]
    assert area(seen[0], "kl") == FIRST_KL | {"coef": 0.5}
    assert 0.0 < seen[1]["kl/mean"] < seen[1]["kl/max"]


@pytest.mark.slow
def test_resumed_run_has_the_same_teacher(ranks, models, tmp_path):
    """The checkpoint has no teacher; evicted weights must come back bit by bit."""
    batch = random_batch(RAGGED, num_mini_batches=2)
    how = taught_by(models, "deep-untied", data=2, offload=("parameters",))
    saving = partial(train, save=tmp_path / "saved", save_after=2)
    whole, weights = ranks.on(STUDENT, saving, batch, 4, **how)[0]
    assert not (tmp_path / "saved" / "reference").exists()
    go_on = partial(train, load=tmp_path / "saved", first_step=3)
    rest, again = ranks.on(STUDENT, go_on, batch, 2, **how)[0]
    assert rest == whole[2:] and rest[0]["kl/mean"] > 0.0
    for name, weight in weights.items():
        assert again[name].tobytes() == weight.tobytes(), name
    kept = how | {"offload": ()}
    assert ranks.on(STUDENT, go_on, batch, 2, **kept)[0][0] == rest
