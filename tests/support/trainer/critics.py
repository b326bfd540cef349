"""Actions of a rank's critic for tests; they run inside the trainer processes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from megadapo.algorithm.reference import generalized_advantages
from megadapo.data.batch import PackedBatch
from tests.support.trainer import probes
from tests.support.trainer.ranks import DISCOUNT, GAE_LAMBDA, VALUE_CLIP

if TYPE_CHECKING:
    from megadapo.trainer.critic import Critic


def head_weight(hidden_size: int) -> np.ndarray:
    """A value head that is not 0, so that a gradient reaches the layers."""
    return np.random.default_rng(5).normal(0.0, 0.3, (1, hidden_size)).astype(np.float32)


def observe(rendezvous, settings, batch) -> dict[str, Any]:
    """Token advantages, and loss and gradients of a mini-batch with shifted old values."""
    rank = probes.build(rendezvous, settings)
    critic = rank.critic
    assert critic is not None
    set_head(critic)
    split = [probes.with_old_policy(rank, part) for part in probes.split_of(rank, batch)]
    split = critic.add_advantages(split, kl_coef=0.0)
    advantages = {
        int(place): float(value)
        for mini_batch in split
        for part in mini_batch
        if part.has_computed_advantages
        for place, value in zip(part.batch_index, part.advantages[part.rows].tolist(), strict=True)
    }
    moved = [
        replace(part, values_old=part.values_old + _moves(part.batch_index).float())
        for part in split[0]
        if part.values_old is not None
    ]
    first = split[0].with_policy(moved)
    sums, norm, full = probes.full_gradients(rank, critic, lambda: critic.gradients(first))
    everyone: list[dict[int, float]] = [{} for _ in range(rendezvous.world_size)]
    torch.distributed.all_gather_object(everyone, advantages)
    merged = {place: value for part in everyone for place, value in part.items()}
    return {
        "loss": sums["critic/loss"],
        "clipped": sums["critic/clip_fraction"],
        "gradients": full,
        "norm": norm,
    } | {"advantages": [merged[place] for place in sorted(merged)]}


def returns_with_kl(rendezvous, settings, batch, kl: np.ndarray) -> np.ndarray:
    """[T] targets of the critic for rewards that pay for `kl`, less those without; else 0."""
    rank = probes.build(rendezvous, settings)
    split = [probes.with_old_policy(rank, part) for part in probes.split_of(rank, batch)]
    difference = np.zeros(len(batch.tokens))
    for sign, values in ((1.0, kl), (-1.0, np.zeros_like(kl))):
        with_kl = [
            mini_batch.with_policy(
                [
                    replace(micro_batch, kl=torch.from_numpy(values[micro_batch.batch_index]))
                    for micro_batch in mini_batch
                ]
            )
            for mini_batch in split
        ]
        kl_coef = settings.algorithm.objective.kl_reward_coef
        for mini_batch in rank.critic.add_advantages(with_kl, kl_coef=kl_coef):
            for micro_batch in mini_batch:
                if micro_batch.returns is not None:
                    returns = micro_batch.returns.double().numpy()
                    difference[micro_batch.batch_index] += sign * returns
    return difference


def set_head(critic: Critic) -> None:
    """Give the value head weights."""
    head = critic.parameters.get("output_layer.weight")
    if head is not None:
        head.data.copy_(torch.from_numpy(head_weight(head.shape[1])))


def definition(folder: Path, batch: PackedBatch) -> dict[str, Any]:
    """Compute the expected result of `observe` with a transformers model in fp64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).model
    head = torch.from_numpy(head_weight(model.config.hidden_size)).double().requires_grad_()
    edges = batch.cu_seqlens.tolist()
    values, raw, places = [], [], []
    for start, stop, prompt in zip(edges, edges[1:], batch.prompt_lengths, strict=False):
        own = [t for t in range(start + prompt, stop) if batch.loss_weights[t] != 0]
        hidden = model(torch.from_numpy(batch.tokens[start:stop])[None]).last_hidden_state[0]
        states = torch.tensor([t - 1 - start for t in own], dtype=torch.int64)
        values.append((hidden[states] @ head[0]) if own else hidden.new_zeros(0))
        to_go = [*batch.advantages[own].astype(np.float64).tolist(), 0.0]
        rewards = [now - later for now, later in pairwise(to_go)]
        raw += generalized_advantages(
            rewards,
            values[-1].tolist(),
            [0, len(own)],
            discount=DISCOUNT,
            gae_lambda=GAE_LAMBDA,
        )
        places += own
    new, advantages = torch.cat(values), np.array(raw)
    returns = new.detach() + torch.from_numpy(advantages)
    old = new.detach() + _moves(np.array(places))
    weights = torch.from_numpy(batch.loss_weights[places]).double()
    in_first = np.isin(_sequence_of(batch)[places], batch.mini_batches[0])
    clipped = new.clamp(old - VALUE_CLIP, old + VALUE_CLIP)
    worst = torch.maximum((new - returns) ** 2, (clipped - returns) ** 2)
    loss = (weights * 0.5 * worst)[torch.from_numpy(in_first)].sum()
    loss.backward()
    gradients = {f"model.{name}": p.grad.numpy() for name, p in model.named_parameters()}
    assert head.grad is not None
    return {
        "loss": loss.item(),
        "gradients": gradients | {"score.weight": head.grad.numpy()},
        "advantages": (advantages - advantages.mean()) / advantages.std(ddof=1),
    }


def _sequence_of(batch: PackedBatch) -> np.ndarray:
    return np.repeat(np.arange(batch.num_sequences), np.diff(batch.cu_seqlens))


def _moves(places: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(0.1 * np.sin(places))


def train(
    rendezvous, settings, batch, steps: range, load=None, save: Path | None = None, save_after=None
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Results of the steps, and the full weights of policy and critic after them.

    `save_after`: the step whose state is saved; None: the last one's.
    """
    rank = probes.build(rendezvous, settings, load)
    where = None if save is None else (save_after or steps[-1], save)
    results = list(probes.steps_of(rank, batch, steps, save=where))
    return results, probes.gathered(rank), probes.gathered(rank.critic)
