"""One batch of the policy head, and our head's step on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megadapo.algorithm.objective import PolicyObjective
from megadapo.errors import ConfigError
from megadapo.kernels.policy_head import policy_head_loss
from megadapo.kernels.policy_head.tiling import plan_tiling

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OURS = "megadapo"
PRODUCTS = "three products alone"
"""Names of our head and of its lower bound in records of the benchmark."""
Loss = Callable[["HeadInputs"], Tensor]
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


@dataclass(frozen=True, kw_only=True)
class HeadInputs:
    """The inputs of a head, ours or another."""

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


def ours(inputs: HeadInputs) -> Tensor:
    """Compute our loss as the trainer does, in the tiling of the whole vocabulary."""
    shape, device = inputs.shape, inputs.hidden.device
    tiling = plan_tiling(
        shape.vocab_size * shape.tensor_parallel, shape.hidden_size, shape.dtype, device
    )
    return policy_head_loss(
        inputs.hidden,
        inputs.weight,
        inputs.targets,
        logprobs_old=inputs.logprobs_old,
        advantages=inputs.advantages,
        loss_weights=inputs.loss_weights,
        objective=inputs.objective,
        temperature=shape.temperature,
        chunk_tokens=tiling.block_rows,
        tile_tokens=tiling.tile_rows,
        tp_invariant=device.type == "cpu",  # on CUDA as without trainer.deterministic
    ).loss


def loss_step(loss: Loss, inputs: HeadInputs) -> tuple[Tensor, ...]:
    """Compute the gradients of a forward and backward pass, and store none."""
    return torch.autograd.grad(loss(inputs), (inputs.hidden, inputs.weight))


def choose_device(name: str | None) -> torch.device:
    """Return the named device, or CUDA if available, or the CPU."""
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device=cuda: torch sees no CUDA device")
    return device


def parse_shape(text: str, temperature: float) -> HeadShape:
    """Parse a shape T,H,V,DTYPE or T,H,V,DTYPE,TP, in which V is the part of one rank."""
    try:
        whole = text if text.count(",") == 4 else f"{text},1"
        tokens, hidden, vocab, dtype, ranks = whole.split(",")
        shape = HeadShape(
            num_tokens=int(tokens),
            hidden_size=int(hidden),
            vocab_size=int(vocab),
            dtype=DTYPES[dtype],
            temperature=temperature,
            tensor_parallel=int(ranks),
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"--shape={text}: expected T,H,V,DTYPE[,TP] with DTYPE one of {', '.join(DTYPES)}"
        ) from error
    sizes = (shape.num_tokens, shape.hidden_size, shape.vocab_size, shape.tensor_parallel)
    if shape.num_tokens % 8 or min(sizes) < 1:
        raise ConfigError(f"--shape={text}: T must be a multiple of 8, and all sizes positive")
    return shape
