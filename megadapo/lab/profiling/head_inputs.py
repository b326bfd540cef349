"""One batch for every baseline of the policy head, and its exact result in fp64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megadapo.algorithm.objective import PolicyObjective
from megadapo.kernels.policy_head.head import policy_head_loss_definition

NUM_SEQUENCES = 8
"""Responses in the batch, each with one advantage, as some baselines require."""
LOGIT_STD = 3.0
RATIO_STD = 0.1
_CHUNK_ROWS = 512


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Sizes of a batch: 8 responses of equal length, without prompt tokens."""

    num_tokens: int
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    temperature: float = 1.0
    tensor_parallel: int = 1
    """Ranks of equal size that the vocabulary is split over; `vocab_size` is one rank's part."""

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        shape = f"T={self.num_tokens} H={self.hidden_size} V={self.vocab_size} {dtype}"
        if self.tensor_parallel > 1:
            shape = f"{shape} of TP {self.tensor_parallel}"
        return shape if self.temperature == 1.0 else f"{shape} temperature={self.temperature}"

    @property
    def useful_tflop(self) -> float:
        """TFLOP of the three products that every exact head computes."""
        return 6e-12 * self.num_tokens * self.hidden_size * self.vocab_size


@dataclass(frozen=True, kw_only=True)
class HeadInputs:
    """The inputs of every baseline."""

    shape: HeadShape
    hidden: Tensor  # [T, H], requires grad
    weight: Tensor  # [V, H], requires grad
    targets: Tensor  # [T]
    logprobs_old: Tensor  # [T] fp32
    sequence_advantages: Tensor  # [8] fp32
    objective: PolicyObjective

    @property
    def advantages(self) -> Tensor:
        length = self.shape.num_tokens // NUM_SEQUENCES
        return self.sequence_advantages.repeat_interleave(length)

    @property
    def loss_weights(self) -> Tensor:
        return torch.full_like(self.logprobs_old, 1.0 / self.shape.num_tokens)


def make_inputs(shape: HeadShape, device: torch.device, seed: int = 42) -> HeadInputs:
    """Draw a batch; targets come from the softmax, as random ones would have log-probs of -30."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    hidden = normal(shape.num_tokens, shape.hidden_size).to(shape.dtype)
    weight = normal(shape.vocab_size, shape.hidden_size) * LOGIT_STD / shape.hidden_size**0.5
    weight = weight.to(shape.dtype)
    targets, logprobs = [], []
    for rows in hidden.split(_CHUNK_ROWS):
        logits = (rows @ weight.t()).float() / shape.temperature
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        targets.append(drawn[:, 0])
        logprobs.append(logits.log_softmax(-1).gather(1, drawn)[:, 0])
    advantages = normal(NUM_SEQUENCES)
    return HeadInputs(
        shape=shape,
        hidden=hidden.requires_grad_(),
        weight=weight.requires_grad_(),
        targets=torch.cat(targets),
        logprobs_old=torch.cat(logprobs) + RATIO_STD * normal(shape.num_tokens),
        sequence_advantages=(advantages - advantages.mean()) / advantages.std(),
        objective=PolicyObjective(),
    )


def compute_exact(inputs: HeadInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, d_hidden and d_weight in fp64, computed a few rows at a time."""
    weight = inputs.weight.detach().double().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64, device=weight.device)
    d_hidden = []
    for start in range(0, inputs.shape.num_tokens, _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        hidden = inputs.hidden.detach()[rows].double().requires_grad_()
        part = policy_head_loss_definition(
            hidden,
            weight,
            inputs.targets[rows],
            logprobs_old=inputs.logprobs_old[rows].double(),
            advantages=inputs.advantages[rows].double(),
            loss_weights=inputs.loss_weights[rows].double(),
            objective=inputs.objective,
            temperature=inputs.shape.temperature,
        )
        part.backward()
        loss += part.detach()
        assert hidden.grad is not None
        d_hidden.append(hidden.grad)
    assert weight.grad is not None
    return loss, torch.cat(d_hidden), weight.grad
