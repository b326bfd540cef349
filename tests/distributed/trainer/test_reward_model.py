"""The reward model: its pairs' loss and gradient at every split, its checkpoints and its export."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from megadapo.algorithm.preferences import pair_statistics
from megadapo.data.batch import PackedBatch
from megadapo.data.pairs import Pair, pack_pairs
from megadapo.run.export.export import ExportSource, export_checkpoint
from megadapo.run.state.checkpoint import Checkpoint
from megadapo.trainer.types import Metrics
from tests.support.trainer import critics, probes
from tests.support.trainer.batches import VOCAB_SIZE
from tests.support.trainer.critics import head_weight, set_head
from tests.support.trainer.gradients import assert_close_by_block, errors_by_block
from tests.support.trainer.ranks import layout, with_marks


def random_pairs(*updates: list[tuple[int, int]], seed: int = 0) -> PackedBatch:
    """Pairs of the given lengths for each update, whose answers share a prompt."""
    rng = np.random.default_rng(seed)
    parts = []
    for lengths in updates:
        prompts = rng.integers(0, VOCAB_SIZE, (len(lengths), 2))
        parts.append(
            [
                Pair(*(np.append(prompt, rng.integers(0, VOCAB_SIZE, n - 2)) for n in pair))
                for prompt, pair in zip(prompts, lengths, strict=True)
            ]
        )
    return pack_pairs(parts)


LAYOUTS = with_marks(("dp2-overlap", "cp2-vpp2-small"), full=("small", "tp2", "pp2", "cp2-tp2-sp"))
PAIRS = random_pairs([(5, 61), (33, 40), (3, 3), (90, 12), (7, 50)], [(19, 28), (20, 8)])
"""Two updates; a budget of 64 tokens separates the answers of most pairs."""
ORIGIN = {"tensor": 2, "sequence": True}


def build(rendezvous, settings):
    from megadapo.trainer.stage_ranks import RewardModelRank

    return RewardModelRank(settings, rendezvous)


def observe(rendezvous, settings, batch) -> dict[str, Any]:
    """Scores, and loss and gradients of the first mini-batch, with a head that is not 0."""
    from megadapo.trainer.update.metrics import Sums

    rank = build(rendezvous, settings)
    set_head(rank.critic)
    scores, members = rank.scores(batch), batch.mini_batches[0]
    mini_batch = rank.splitter.split_responses(batch)[0]

    def compute() -> Sums:
        rank.gradients(mini_batch, members, scores)
        return Sums()

    place = SimpleNamespace(settings=settings, device=rank.device, has_results=True)
    _, norm, full = probes.full_gradients(place, rank.critic, compute)
    return {
        "scores": scores,
        "gradients": full,
        "norm": norm,
        **pair_statistics(scores[members]),
    }


def train(
    rendezvous, settings, batch, steps: range, load=None, save: Path | None = None
) -> tuple[list[Metrics], dict[str, np.ndarray]]:
    """Metrics of the steps, and the full weights after them; `save`: the last step's state."""
    rank = build(rendezvous, settings)
    if load is not None:
        rank.load(load)
    where = None if save is None else (steps[-1], save)
    metrics = list(probes.steps_of(rank, batch, steps, save=where))
    return metrics, probes.gathered(rank.critic)


def definition(folder: Path, batch: PackedBatch) -> dict[str, Any]:
    """Compute the expected result of `observe` with a transformers model in fp64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).model
    head = torch.from_numpy(head_weight(model.config.hidden_size)).double().requires_grad_()
    edges = batch.cu_seqlens.tolist()
    scores = []
    for start, stop in zip(edges, edges[1:], strict=False):
        # without the token that only makes room for the score
        own = torch.from_numpy(batch.tokens[start : stop - 1])[None]
        scores.append(model(own).last_hidden_state[0, -1] @ head[0])
    found = torch.stack(scores)
    first = found[torch.from_numpy(batch.mini_batches[0])]
    loss = -functional.logsigmoid(first[0::2] - first[1::2]).mean()
    loss.backward()
    gradients = {f"model.{name}": p.grad.numpy() for name, p in model.named_parameters()}
    assert head.grad is not None
    return {
        "scores": found.detach().numpy(),
        "loss": loss.item(),
        "gradients": gradients | {"score.weight": head.grad.numpy()},
    }


def _observe(ranks, **how):
    return ranks.on("deep-tied", observe, PAIRS, critic={}, **how)[0]


@pytest.fixture(scope="module")
def alone(ranks):
    """One rank, one micro-batch an update."""
    return _observe(ranks, tokens_per_micro_batch=100_000)


@pytest.fixture(scope="module")
def expected(models):
    """The definition in fp64."""
    return definition(models / "deep-tied", PAIRS)


def test_scores_loss_and_gradients_equal_the_definition(alone, expected):
    """A score of another token than the last, or a pair's sign or weight, would show."""
    np.testing.assert_allclose(alone["scores"], expected["scores"], rtol=0, atol=1e-5)
    assert alone["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert 0.0 < alone["accuracy"] < 1.0
    assert_close_by_block(alone["gradients"], expected["gradients"], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_keeps_loss_and_gradient(ranks, alone, expected, name):
    """A pair may be split over micro-batches and ranks, which must not change its loss."""
    found = _observe(ranks, **layout(name))
    np.testing.assert_allclose(found["scores"], alone["scores"], rtol=0, atol=2e-6)
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert found["norm"] == pytest.approx(alone["norm"], rel=1e-6)
    errors = errors_by_block(found["gradients"], expected["gradients"])
    # some processors' products round more, also on one rank alone
    own = errors_by_block(alone["gradients"], expected["gradients"])
    assert all(error <= max(1e-6, 1.25 * own[block]) for block, error in errors.items()), errors


def test_training_orders_its_pairs(ranks):
    """The value head starts at 0, so the first update finds ties."""
    ((metrics, _),) = ranks.on("deep-tied", train, PAIRS, range(1, 17), critic={})
    # log 2 of ties, and the second update
    assert metrics[0]["policy/loss"] > 0.5
    assert metrics[-1]["pairs/accuracy"] == 1.0
    assert metrics[-1]["policy/loss"] < 0.5 * metrics[0]["policy/loss"]
    assert metrics[-1]["policy/skipped_updates"] == 0


@pytest.mark.slow
def test_saved_state_resumes_at_every_split_and_starts_a_critic(ranks, models, tmp_path):
    """Moments, weights and value head are all needed for the same next step."""
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path / "step-3" / "trainer"
    arguments = (PAIRS, range(1, 4), None, folder)
    ranks.on("deep-tied", train, *arguments, critic={}, **ORIGIN)
    results = [
        ranks.on("deep-tied", train, PAIRS, range(4, 5), folder, critic={}, **split)
        for split in (ORIGIN, layout("cp2-vpp2"))
    ]
    (same, weights), (other, others) = results[0][0], results[1][0]
    assert other[0]["policy/loss"] == pytest.approx(same[0]["policy/loss"], rel=1e-5)
    for name, weight in weights.items():
        np.testing.assert_allclose(others[name], weight, rtol=0, atol=5e-6, err_msg=name)
    source, exported = ExportSource(Checkpoint(folder.parent, 3, {}), None), tmp_path / "model"
    export_checkpoint(source, exported, model=str(models / "deep-tied"))
    theirs = AutoModelForSequenceClassification.from_pretrained(exported).state_dict()
    ((_, _, ours),) = ranks.on(
        "deep-tied", critics.train, PAIRS, range(1, 1), critic={"path": str(exported)}
    )
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].numpy().tobytes() for name in ours)
    assert float(np.abs(ours["score.weight"]).max()) > 0.0
