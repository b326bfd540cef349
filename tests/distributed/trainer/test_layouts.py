"""The split does not matter: one batch under every layout gives one loss and one gradient."""

import numpy as np
import pytest

from tests.support.trainer.batches import RAGGED, random_batch
from tests.support.trainer.gradients import assert_close_by_block, assert_same, measure
from tests.support.trainer.probes import Gradients, initial_weights, logprobs, train
from tests.support.trainer.ranks import OVERLAP, Ranks, layout

LAYOUTS = (
    *("one", "small", "large", "tp2", "tp2-sp", "pp2", "dp2-small", "tp2-pp2-sp"),
    *("recompute", "attn+mlp", "tp2-pp2-sp-recompute"),
    *("dp2-overlap", "pp2-dp2-overlap", "tp2-dp2-sp-overlap"),
    *("cp2", "cp4-small", "cp2-tp2-sp-attn", "cp2-dp2-overlap"),
)
DEEP_LAYOUTS = (
    "vpp2",
    "tp2-vpp2-sp",
    "vpp2-dp2-overlap",
    "pp2-last1",
    "cp2-vpp2-mlp",
    "pp3-first2",
)
PARTS = (
    *("one", "pp2", "recompute", "dp2-small", "tp2-dp2-sp-overlap", "cp2-dp2-overlap", "vpp2"),
    *("large", "tp2-sp", "dp2-overlap", "attn+mlp"),
)
"""Layouts whose parts others have too: they show where a failure is, not that there is one."""
BOTH = ("tp2", "tp2-pp2-sp", "cp2", "vpp2-dp2-overlap")
"""Splits at which an output layer of its own makes the greatest difference."""


def cases(names: tuple[str, ...], model: str) -> list:
    """Every layout with tied embeddings, some with untied ones as well, in `make test-all` all."""
    return [
        pytest.param(name, f"{model}-{kind}", marks=marks)
        for name in names
        for kind in ("tied", "untied")
        for is_first in [name in BOTH or (kind == "tied" and name not in PARTS)]
        for marks in [[] if is_first else [pytest.mark.full]]
    ]


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> dict[str, Gradients]:
    """One rank, one micro-batch."""
    batch = random_batch(RAGGED)
    return {
        name: measure(ranks, name, batch, tokens_per_micro_batch=100_000)
        for name in ("qwen2-tied", "qwen2-untied", "deep-tied", "deep-untied")
    }


@pytest.mark.parametrize(
    ("name", "model"), [*cases(LAYOUTS, "qwen2"), *cases(DEEP_LAYOUTS, "deep")]
)
def test_layout_keeps_loss_and_gradient(ranks, reference, model, name):
    found = measure(ranks, model, random_batch(RAGGED), **layout(name))
    assert_same(found, reference[model])


def test_layout_changes_nothing_with_query_and_key_norms(ranks):
    """Their gradients are partial sums over heads on each tensor-parallel rank."""
    batch = random_batch(RAGGED)
    expected = measure(ranks, "qwen3", batch)
    for sequence in (False, True):
        assert_same(measure(ranks, "qwen3", batch, tensor=2, sequence=sequence), expected)


def test_gradients_equal_the_definition(ranks, models, reference):
    """All layouts could agree on a wrong number: a dense transformers model in fp64."""
    from tests.support.trainer.definition import loss_and_gradients

    loss, by_name = loss_and_gradients(models / "qwen2-tied", random_batch(RAGGED))
    found = reference["qwen2-tied"]
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert_close_by_block(found.by_name, by_name, 1e-5)


def test_a_rank_without_sequences_takes_part(ranks):
    """Fewer sequences, or tokens, than ranks must neither hang nor change the gradient."""
    for length, splits in {
        40: [{}, OVERLAP, {"tensor": 2, "sequence": True}],
        2: [{"context": 2}],
    }.items():
        batch = random_batch([length])
        expected = measure(ranks, "qwen2-tied", batch)
        for split in splits:
            assert_same(measure(ranks, "qwen2-tied", batch, data=2, **split), expected)


@pytest.mark.parametrize("virtual", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_first_ratio_is_one_and_runs_repeat_to_the_bit(ranks, virtual):
    split = {"tensor": 2, "pipeline": 2, "virtual": virtual, "sequence": True}
    batch = random_batch(RAGGED, num_mini_batches=3)
    (first, weights), (again, same_weights) = (
        ranks.on("deep-tied", train, batch, 2, **split, tokens_per_micro_batch=100)[0]
        for _ in range(2)
    )
    assert [step["policy/ratio_first_max_error"] for step in first] == [0.0, 0.0]
    # later mini-batches see other weights than the old log-probs: the ratio is really measured
    assert all(abs(step["policy/ratio_mean"] - 1.0) > 1e-6 for step in first)
    assert first == again
    for name, weight in weights.items():
        assert weight.tobytes() == same_weights[name].tobytes(), name


def test_logprobs_of_all_ranks_fill_the_batch(ranks):
    batch = random_batch(RAGGED, num_mini_batches=2)
    answers = ranks.on("qwen2-untied", logprobs, batch, data=2, pipeline=2)
    parts = [part for part in answers if part is not None]
    known = np.array([np.isfinite(part) for part in parts])
    assert len(parts) == 2
    assert (known.sum(axis=0) == np.isfinite(batch.logprobs_rollout)).all()


def test_random_weights_do_not_depend_on_the_split(ranks):
    whole, split, other = (
        ranks.on("qwen2-untied", initial_weights, init="random", **how)[0]
        for how in ({"seed": 5}, {"seed": 5, "tensor": 2, "pipeline": 2}, {"seed": 6})
    )
    for name, weight in whole.items():
        assert weight.tobytes() == split[name].tobytes(), name
    drawn = "model.layers.0.mlp.up_proj.weight"
    assert not np.array_equal(whole[drawn], other[drawn])
    assert not np.array_equal(whole[drawn], whole["model.layers.1.mlp.up_proj.weight"])
