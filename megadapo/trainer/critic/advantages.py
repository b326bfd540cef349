"""Advantages of a step's tokens from a critic's values, on every rank of the trainer.

Micro-batches hold whole sequences. So advantages are computed beside the values, and no value
leaves the last pipeline stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.gae import generalized_advantages, terminal_rewards
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.batch.mini_batch import MiniBatch
from megadapo.trainer.model.parallel import add_up_over_context, has_results


def with_token_advantages(
    split: Sequence[MiniBatch],
    values: Sequence[Sequence[Tensor]],
    algorithm: AlgorithmConfig,
    *,
    kl_coef: float,
    device: torch.device,
) -> tuple[list[MiniBatch], list[list[np.ndarray]]]:
    """Return the mini-batches with advantages that are whitened over the step's tokens; collective.

    Args:
        split: this rank's part of each mini-batch, with the KL divergence that rewards include.
        values: [mini-batch][micro-batch] -> [R] of the predicted tokens; empty lists except on the
            last pipeline stage.

    Returns:
        The mini-batches, and [R] float64 advantages of each micro-batch before that.
    """
    raw = [
        [
            _token_advantages(micro_batch, own, algorithm, kl_coef=kl_coef)
            for micro_batch, own in zip(mini_batch, parts, strict=False)
        ]
        for mini_batch, parts in zip(split, values, strict=True)
    ]
    flat = [advantages for parts in raw for advantages in parts]
    whitened = iter(_whitened_over_ranks(flat, contributes=has_results(), device=device))
    found = [
        mini_batch.with_policy(
            [
                micro_batch.with_advantages(next(whitened))
                for micro_batch, _ in zip(mini_batch, parts, strict=False)
            ]
        )
        for mini_batch, parts in zip(split, raw, strict=True)
    ]
    return found, raw


def values_of_tokens(
    split: Sequence[MiniBatch], values: np.ndarray, device: torch.device
) -> list[list[Tensor]]:
    """Return known values [T] of a batch as `with_token_advantages` takes them."""
    is_last = mpu.is_pipeline_last_stage()
    return [
        [
            torch.from_numpy(values[micro_batch.batch_index]).to(device)
            for micro_batch in mini_batch
            if is_last
        ]
        for mini_batch in split
    ]


def _token_advantages(
    micro_batch: MicroBatch, values: Tensor, algorithm: AlgorithmConfig, *, kl_coef: float
) -> np.ndarray:
    """Return [R] float64 of the predicted tokens; each token's reward includes its own KL."""
    known = [micro_batch.advantages[micro_batch.rows], values]
    if kl_coef != 0.0:
        assert micro_batch.kl is not None, "ReferencePolicy.add_logprobs sets it"
        known.append(micro_batch.kl)
    scores, of_states, *kl = _of_whole_sequences(micro_batch, known)
    rewards = terminal_rewards(scores, micro_batch.sequences_all_ranks)
    for divergence in kl:
        rewards -= kl_coef * divergence
    advantages = generalized_advantages(
        rewards,
        of_states,
        micro_batch.sequences_all_ranks,
        discount=algorithm.discount,
        gae_lambda=algorithm.gae_lambda,
    )
    own: np.ndarray = advantages[micro_batch.own_of_all_ranks]
    return own


def _whitened_over_ranks(
    pieces: Sequence[np.ndarray], *, contributes: bool, device: torch.device
) -> list[np.ndarray]:
    """Subtract the mean over all ranks and divide by the unbiased standard deviation; collective.

    Equal numbers become 0. Ranks that do not contribute use the others' mean and deviation.

    Args:
        pieces: of this rank, [n] float64 each.
    """
    own = np.concatenate([np.empty(0), *(pieces if contributes else ())])
    count, total = _sums([len(own), own.sum()], device)
    ends = torch.tensor(
        [own.max(initial=-math.inf), -own.min(initial=math.inf)], dtype=torch.float64, device=device
    )
    torch.distributed.all_reduce(ends, op=torch.distributed.ReduceOp.MAX)
    largest, smallest = ends[0].item(), -ends[1].item()
    mean = total / max(1.0, count)
    (squares,) = _sums([np.square(own - mean).sum()], device)
    # NaN may be lost in the maxima, but not in the sum
    if count < 2 or (largest == smallest and math.isfinite(total)):
        return [np.zeros_like(piece) for piece in pieces]
    deviation = math.sqrt(squares / (count - 1))
    return [(piece - mean) / deviation for piece in pieces]


def _sums(values: Sequence[float], device: torch.device) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total)
    sums: list[float] = total.tolist()
    return sums


def _of_whole_sequences(micro_batch: MicroBatch, known: Sequence[Tensor]) -> np.ndarray:
    """Return each [R] as [N] float64, with the values of the other context-parallel ranks."""
    shape = (len(known), len(micro_batch.sequences_all_ranks))
    values = micro_batch.rows.new_zeros(shape, dtype=torch.float64)
    own = torch.from_numpy(micro_batch.own_of_all_ranks).to(values.device)
    values[:, own] = torch.stack([values_here.double() for values_here in known])
    add_up_over_context(values)
    found: np.ndarray = values.cpu().numpy()
    return found
