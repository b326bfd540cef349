"""The critic: no split changes it, all of it is saved, and its warm-up leaves the policy alone."""

import shutil
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megadapo.algorithm.objective import PolicyObjective
from megadapo.run.export.export import ExportSource, export_checkpoint
from megadapo.run.state.checkpoint import Checkpoint
from megadapo.trainer.types import CRITIC_FOLDER
from tests.support.trainer import critics, probes
from tests.support.trainer.batches import RAGGED, random_batch
from tests.support.trainer.gradients import assert_close_by_block
from tests.support.trainer.ranks import Ranks, layout, with_marks

LAYOUTS = with_marks(("dp2-overlap", "cp2-tp2-sp", "cp2-vpp2-small"), full=("small", "tp2"))


def _batch():
    """A response of one token, one without a loss, one that has lost a token in its middle, and two
    with a step that is rewarded before the end: at a token, and at the lost one."""
    batch = random_batch(RAGGED, num_mini_batches=2)
    batch.loss_weights[batch.cu_seqlens[1] : batch.cu_seqlens[2]] = 0.0
    batch.loss_weights[batch.cu_seqlens[4] - 10] = 0.0
    for end in (batch.cu_seqlens[4] - 9, batch.cu_seqlens[6] - 2):
        first = batch.cu_seqlens[np.searchsorted(batch.cu_seqlens, end) - 1]
        batch.advantages[first:end] += 0.8
    return batch


def _observe(ranks: Ranks, **how: Any) -> dict[str, Any]:
    return ranks.on("deep-tied", critics.observe, _batch(), critic={}, **how)[0]


_TWO_UPDATES = random_batch(RAGGED, num_mini_batches=2)
ORIGIN = {"tensor": 2, "sequence": True}


@pytest.fixture(scope="module")
def saved(
    ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any], dict[str, np.ndarray]]:
    """Three steps, saved; and what the fourth gives: its result and the critic's weights."""
    folder = tmp_path_factory.mktemp("critic") / "step-3" / "trainer"
    arguments = (_TWO_UPDATES, range(1, 5), None, folder, 3)
    results, _, critic = ranks.on("deep-tied", critics.train, *arguments, critic={}, **ORIGIN)[0]
    return folder, results[3], critic


@pytest.fixture(scope="module")
def alone(ranks: Ranks) -> dict[str, Any]:
    """One rank, one micro-batch an update."""
    return _observe(ranks, tokens_per_micro_batch=100_000)


def test_advantages_count_the_divergence_of_later_tokens(ranks):
    """GAE is linear in the rewards, so what a KL divergence changes is its own discounted sum."""
    batch = _batch()
    kl = np.where(batch.loss_weights != 0, np.sin(np.arange(len(batch.tokens))), 0.0)
    objective = PolicyObjective(kl_coef=0.3, kl_in="reward", kl_value="k1")
    changes = {"objective": objective, "critic": {}}
    (found,) = ranks.on("deep-tied", critics.returns_with_kl, batch, kl, **changes)
    for start, stop in pairwise(batch.cu_seqlens):
        own = [t for t in range(start, stop) if batch.loss_weights[t] != 0]
        behind = 0.0
        for t in reversed(own):
            behind = -0.3 * kl[t] + critics.DISCOUNT * critics.GAE_LAMBDA * behind
            assert found[t] == pytest.approx(behind, abs=1e-6)


def test_advantages_loss_and_gradients_equal_the_definition(models, alone):
    """All layouts could agree on a wrong number: a transformers model and plain loops in fp64."""
    expected = critics.definition(models / "deep-tied", _batch())
    np.testing.assert_allclose(alone["advantages"], expected["advantages"], rtol=0, atol=1e-5)
    assert alone["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert alone["clipped"] > 0
    assert_close_by_block(alone["gradients"], expected["gradients"], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_keeps_advantages_and_the_critics_gradient(ranks, alone, name):
    found = _observe(ranks, **layout(name))
    np.testing.assert_allclose(found["advantages"], alone["advantages"], rtol=0, atol=2e-6)
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert found["norm"] == pytest.approx(alone["norm"], rel=1e-6)
    assert_close_by_block(found["gradients"], alone["gradients"], 1e-6)


def test_step_uses_token_advantages_and_improves_the_critic(ranks):
    """Values begin at 0, and the policy learns from other numbers than the batch's."""
    batch, steps = _TWO_UPDATES, range(1, 5)
    ((results, policy, _),) = ranks.on("qwen2-tied", critics.train, batch, steps, critic={})
    ((plain, without),) = ranks.on("qwen2-tied", probes.train, batch, 4)
    assert [step["policy/ratio_first_max_error"] for step in results] == [0.0] * 4
    assert results[0]["critic/value_mean"] == 0.0
    losses = [step["critic/loss"] for step in results]
    assert losses == sorted(losses, reverse=True)
    assert results[-1]["critic/explained_variance"] > 0.0
    assert any(policy[name].tobytes() != weight.tobytes() for name, weight in without.items())
    assert "critic/loss" not in plain[0]


def test_critic_warm_up_changes_no_bit_of_the_policy(ranks, tmp_path):
    """Moments that had moved, too, would show in the first step behind the warm-up."""
    train = partial(ranks.on, "qwen2-tied", critics.train, _TWO_UPDATES, critic={"warmup": 2})
    (before,) = ranks.on("qwen2-tied", probes.initial_weights)
    ((results, policy, critic),) = train(range(1, 3), None, tmp_path / "saved")
    for name, weight in before.items():
        assert policy[name].tobytes() == weight.tobytes(), name
    assert [(step["policy/lr"], step["policy/skipped_updates"]) for step in results] == [
        (0.0, 0)
    ] * 2
    assert float(np.abs(critic["score.weight"]).max()) > 0.0
    ((_, moved, _),) = train(range(3, 4), tmp_path / "saved")
    # two updates of AdamW from zero moments move a weight by at most twice the learning rate
    assert max(float(np.abs(moved[n] - before[n]).max()) for n in before) == pytest.approx(
        2e-3, rel=0.1
    )


@pytest.mark.slow
def test_saved_critics_resume_at_every_split(ranks, saved):
    """Without its moments an update moves a weight by another amount of about 1e-3."""
    folder, result, expected = saved
    for split in (ORIGIN, layout("cp2-vpp2")):
        arguments = (_TWO_UPDATES, range(4, 5), folder)
        again, _, found = ranks.on("deep-tied", critics.train, *arguments, critic={}, **split)[0]
        for name, weight in expected.items():
            if split is ORIGIN:
                assert found[name].tobytes() == weight.tobytes(), name
            np.testing.assert_allclose(found[name], weight, rtol=0, atol=5e-6, err_msg=name)
        if split is ORIGIN:
            assert again[0] == result


def test_state_without_a_critic_is_refused(ranks, saved, tmp_path):
    """A new critic beside an old policy would train on noise."""
    shutil.copytree(saved[0], tmp_path / "copy", ignore=shutil.ignore_patterns(CRITIC_FOLDER))
    (refusal,) = ranks.on("deep-tied", probes.load_refusal, tmp_path / "copy", critic={})
    assert "without a critic" in refusal


def test_exported_critic_can_start_a_run(ranks, models, saved, tmp_path):
    from transformers import AutoModelForSequenceClassification

    source = ExportSource(Checkpoint(saved[0].parent, 3, {}), None)
    exported = tmp_path / "critic"
    export_checkpoint(source, exported, model=str(models / "deep-tied"), critic=True)
    model = AutoModelForSequenceClassification.from_pretrained(exported)
    theirs = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    assert theirs["score.weight"].shape == (1, model.config.hidden_size)
    arguments, critic = (_TWO_UPDATES, range(1, 1)), {"path": str(exported)}
    ((_, _, ours),) = ranks.on("deep-tied", critics.train, *arguments, critic=critic)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    assert float(np.abs(ours["score.weight"]).max()) > 0.0


def _first_weights(rendezvous, settings):
    return probes.gathered(probes.build(rendezvous, settings).critic)


def test_critic_of_a_random_policy_starts_at_its_path(ranks, models):
    """With random weights of its own, and a random head, values would be noise."""
    path = {"path": str(models / "deep-untied")}
    (random,) = ranks.on("deep-tied", _first_weights, critic={}, init="random")
    (own,), (expected,) = (
        ranks.on("deep-tied", _first_weights, critic=path, init=init)
        for init in ("random", "pretrained")
    )
    assert not random["score.weight"].any() and random["model.embed_tokens.weight"].any()
    assert all((own[name] == expected[name]).all() for name in expected)
