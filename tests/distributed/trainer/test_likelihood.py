"""Updates of supervised fine-tuning: their loss and gradient under every split."""

from typing import Any

import numpy as np
import pytest
import torch

from megadapo.algorithm.objective import LIKELIHOOD
from megadapo.data.batch import PackedBatch
from megadapo.data.pretraining import pack_likelihood
from tests.support.trainer.batches import VOCAB_SIZE
from tests.support.trainer.definition import load_wide, loss_and_gradients, sequence_logprobs
from tests.support.trainer.probes import build, update
from tests.support.trainer.ranks import Ranks, layout

LENGTHS = ([40, 9, 77, 130, 5, 61], [33, 12, 90, 18])
"""Tokens of the rows of two updates."""
TRAINING = {"trains": "likelihood", "objective": LIKELIHOOD}
LAYOUTS = ("dp2", "tp2-sp", "pp2", "cp2-dp2-small")


def batch_of(number: int) -> PackedBatch:
    """Rows with two answers each: tokens between them are not predicted."""
    rng = np.random.default_rng(number)
    rows = []
    for length in LENGTHS[number]:
        wanted = np.zeros(length, dtype=np.bool_)
        wanted[length // 3 : length // 2] = wanted[-length // 4 :] = True
        rows.append((rng.integers(0, VOCAB_SIZE, length).astype(np.int32), wanted))
    return pack_likelihood([rows])


def two_updates(rendezvous, settings) -> Any:
    """Return the metrics of two steps, each on its own rows."""
    rank = build(rendezvous, settings)
    results = [update(rank, batch_of(number), step=1 + number) for number in (0, 1)]
    return [result.metrics for result in results]


def measure(ranks: Ranks, **how: Any) -> Any:
    return ranks.on("qwen2-tied", two_updates, **TRAINING, **how)[0]


@pytest.fixture(scope="module")
def alone(ranks: Ranks) -> Any:
    """One rank, one micro-batch."""
    return measure(ranks, tokens_per_micro_batch=100_000)


def mean_loss(folder: Any, batch: PackedBatch) -> float:
    """Minus the mean log-prob of the predicted tokens, in float64."""
    model, logprobs = load_wide(folder), []
    for start, stop in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        with torch.no_grad():
            found = sequence_logprobs(model, torch.from_numpy(batch.tokens[start:stop]))
        logprobs.append(found.numpy()[batch.loss_weights[start + 1 : stop] != 0.0])
    return -float(np.concatenate(logprobs).mean())


def test_loss_is_the_mean_over_answer_tokens(models, alone):
    """A mean over rows, or over all tokens, differs: rows have different shares of answers."""
    folder, batch = models / "qwen2-tied", batch_of(0)
    found = alone[0]
    assert found["policy/loss"] == pytest.approx(mean_loss(folder, batch), rel=1e-6)
    assert found["tokens/trained"] == (batch.loss_weights != 0.0).sum()
    loss, by_name = loss_and_gradients(folder, batch, LIKELIHOOD)
    assert found["policy/loss"] == pytest.approx(loss, rel=1e-6)
    norm = sum(float((gradient**2).sum()) for gradient in by_name.values()) ** 0.5
    assert found["policy/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert found["policy/skipped_updates"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_split_keeps_loss_and_updates(ranks, alone, name):
    """The second update's loss shows that the first one moved the weights alike."""
    found = measure(ranks, **layout(name))
    for ours, expected in zip(found, alone, strict=True):
        for key in ("policy/loss", "policy/grad_norm", "policy/entropy"):
            assert ours[key] == pytest.approx(expected[key], rel=1e-6), key
        assert ours["tokens/trained"] == expected["tokens/trained"]


def test_experts_are_balanced_as_in_rollout_steps(ranks):
    """With a coefficient the routers' loss joins the update; without one nothing counts them."""
    balanced, plain = (
        ranks.on("qwen3-moe", two_updates, **TRAINING, aux_loss=coef)[0][0] for coef in (0.1, 0.0)
    )
    assert balanced["experts/balance_loss"] >= 1.0 and "experts/balance_loss" not in plain
    assert balanced["policy/loss"] == pytest.approx(plain["policy/loss"], rel=1e-6)
    assert balanced["policy/grad_norm"] != pytest.approx(plain["policy/grad_norm"], rel=1e-6)
