"""Recorded log-probs are of the right tokens and updates, and recording changes no result."""

import numpy as np
import pytest

from megadapo.algorithm.importance import ImportanceConfig
from megadapo.trainer.types import UpdateResult
from tests.support.trainer.batches import RAGGED, random_batch
from tests.support.trainer.probes import logprobs, recorded_update
from tests.support.trainer.ranks import DISCOUNT, GAE_LAMBDA

SEQUENCES = [0, 2, 4, 7, 11]
"""Sequences of both mini-batches of six; sequence 2 has a single response token."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [{"data": 2, "tokens_per_micro_batch": 64}, {"context": 2, "pipeline": 2}],
    ids=["dp2", "cp2-pp2"],
)
def test_update_records_tokens(ranks, layout):
    batch = random_batch(RAGGED, num_mini_batches=2)
    # one token without a loss: nothing is computed for it
    batch.logprobs_rollout[batch.cu_seqlens[8] - 1] = np.nan
    before = ranks.on("qwen2-tied", logprobs, batch, **layout)
    updates = ranks.on("qwen2-tied", recorded_update, batch, SEQUENCES, **layout)
    silent = ranks.on("qwen2-tied", recorded_update, batch, [], **layout)

    assert updates == silent
    num_parts = sum(update.recorded is not None for update in updates)
    assert num_parts == layout.get("data", 1) * layout.get("context", 1)
    whole = UpdateResult.joined(updates)
    recorded = whole.recorded
    starts = batch.cu_seqlens[:-1] + batch.prompt_lengths
    pieces = [np.arange(starts[i], batch.cu_seqlens[i + 1]) for i in SEQUENCES]
    places = np.concatenate(pieces)
    expected = np.full(len(batch.tokens), np.nan, dtype=np.float32)
    for part in before:
        if part is not None:
            np.copyto(expected, part, where=np.isfinite(part))
    lost = places == batch.cu_seqlens[8] - 1
    assert lost.sum() == 1 and np.isnan(recorded.old[lost]).all()
    assert np.isnan(recorded.update[lost]).all()
    assert np.isnan(recorded.advantages).all(), "those of the batch are known"
    assert np.array_equal(recorded.old[~lost], expected[places][~lost])
    in_first = np.repeat([i < 6 for i in SEQUENCES], [len(piece) for piece in pieces])
    first, second = in_first & ~lost, ~in_first & ~lost
    assert np.array_equal(recorded.update[first], recorded.old[first])
    assert not np.array_equal(recorded.update[second], recorded.old[second])
    assert np.abs(recorded.update[second] - recorded.old[second]).max() < 0.5

    replicas = layout.get("tensor", 1) * layout.get("pipeline", 1)
    assert sum(whole.of_ranks["train/rank_tokens_{}"]) == replicas * len(batch.tokens)


def test_proximal_logprobs_of_stale_tokens_are_the_trainers(ranks):
    """The parity probe would compare an engine with an engine otherwise."""
    batch = random_batch(RAGGED, num_mini_batches=2, policy_version=3)
    rollout = ImportanceConfig(stale_logprobs="rollout")
    (before,) = ranks.on("qwen2-tied", logprobs, batch)
    (update,) = ranks.on("qwen2-tied", recorded_update, batch, SEQUENCES, importance=rollout)
    starts = batch.cu_seqlens[:-1] + batch.prompt_lengths
    places = np.concatenate([np.arange(starts[i], batch.cu_seqlens[i + 1]) for i in SEQUENCES])
    assert np.array_equal(update.recorded.old, batch.logprobs_rollout[places])
    assert np.array_equal(update.recorded.proximal, before[places])


def test_advantages_of_ranks_are_returned(ranks):
    """A critic of 0 leaves each response's discounted score, whitened over updates and ranks."""
    batch = random_batch(RAGGED, num_mini_batches=2)
    layout = {"data": 2, "tokens_per_micro_batch": 64, "critic": {}}
    updates = ranks.on("qwen2-tied", recorded_update, batch, SEQUENCES, **layout)
    recorded = UpdateResult.joined(updates).recorded
    stops, starts = batch.cu_seqlens[1:], batch.cu_seqlens[:-1] + batch.prompt_lengths
    decay = DISCOUNT * GAE_LAMBDA
    raw = [
        batch.advantages[stop - 1] * decay ** np.arange(stop - start - 1, -1, -1.0)
        for start, stop in zip(starts, stops, strict=True)
    ]
    everything = np.concatenate(raw)
    expected = np.concatenate([raw[i] for i in SEQUENCES]) - everything.mean()
    np.testing.assert_allclose(recorded.advantages, expected / everything.std(ddof=1), atol=1e-5)
