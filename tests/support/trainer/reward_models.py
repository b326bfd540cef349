"""Actions of a reward model's ranks for tests; they run inside the trainer processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from megadapo.algorithm.preferences import pair_statistics
from megadapo.data.batch import PackedBatch
from megadapo.data.pairs import Pair, pack_pairs
from megadapo.trainer.types import Metrics
from tests.support.trainer import probes
from tests.support.trainer.batches import VOCAB_SIZE
from tests.support.trainer.critics import head_weight, set_head

if TYPE_CHECKING:
    from megadapo.trainer.critic.reward_model import RewardModelRank


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


def build(rendezvous, settings) -> RewardModelRank:
    from megadapo.trainer.critic.reward_model import RewardModelRank

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
