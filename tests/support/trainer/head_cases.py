"""Inputs for the policy head and its results in fp64, shared by CPU and GPU tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megadapo.algorithm.objective import PolicyObjective
from megadapo.kernels.policy_head import PolicyHeadOutput, policy_head_loss
from megadapo.kernels.policy_head.head import policy_head_loss_definition, token_logprobs_definition


@dataclass
class HeadCase:
    """One call of `policy_head_loss`: tensors, and the keyword arguments beside them."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def loss_weights(self) -> Tensor:
        return self.kwargs["loss_weights"]

    def run(self, scale: float = 1.0, **options: Any) -> HeadResult:
        """Run the head; `options` are added to the call."""
        hidden = self.hidden.clone().requires_grad_()
        weight = self.weight.clone().requires_grad_()
        output = policy_head_loss(hidden, weight, self.targets, **(self.kwargs | options))
        (output.loss * scale).backward()
        return HeadResult(output, hidden.grad, weight.grad)

    def definition(
        self, scale: float = 1.0, dtype: torch.dtype = torch.float64, **options: Any
    ) -> HeadReference:
        """Return the definition's result in fp64; `options` are added to the call."""
        hidden = self.hidden.to(dtype, copy=True).requires_grad_()
        weight = self.weight.to(dtype, copy=True).requires_grad_()
        kwargs = {
            name: value.to(dtype) if isinstance(value, Tensor) else value
            for name, value in self.kwargs.items()
        }
        loss = policy_head_loss_definition(hidden, weight, self.targets, **(kwargs | options))
        (loss * scale).backward()
        with torch.no_grad():
            logprobs, entropy = token_logprobs_definition(
                hidden,
                weight,
                self.targets.clamp(0),
                temperature=self.kwargs["temperature"],
                vocab_size=self.kwargs["vocab_size"],
            )
        chosen = self.loss_weights != 0
        return HeadReference(
            loss.detach(),
            logprobs * chosen,
            entropy * chosen,
            self._distance(dtype) * chosen,
            hidden.grad,
            weight.grad,
        )

    def _distance(self, dtype: torch.dtype) -> Tensor:
        """Return the norm of each log-prob's derivative in its row of logits, by autograd."""
        size, temperature = self.kwargs["vocab_size"], self.kwargs["temperature"]
        logits = self.hidden.to(dtype) @ self.weight[:size].to(dtype).t() / temperature
        asked = logits.requires_grad_()
        log_p = asked.log_softmax(-1)
        log_p.gather(1, self.targets.clamp(0)[:, None]).sum().backward()
        assert asked.grad is not None
        return asked.grad.norm(dim=1)


@dataclass
class HeadResult:
    output: PolicyHeadOutput
    d_hidden: Tensor
    d_weight: Tensor

    def assert_equal(self, expected: HeadResult) -> None:
        """Compare loss and gradients bit by bit."""
        assert torch.equal(self.output.loss, expected.output.loss)
        assert torch.equal(self.d_hidden, expected.d_hidden)
        assert torch.equal(self.d_weight, expected.d_weight)

    def assert_gradients(self, expected: HeadReference | HeadResult, tolerance: float) -> None:
        """Compare both gradients by their relative error."""
        assert relative_error(self.d_hidden, expected.d_hidden) <= tolerance
        assert relative_error(self.d_weight, expected.d_weight) <= tolerance


@dataclass
class HeadReference:
    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    distance: Tensor
    d_hidden: Tensor
    d_weight: Tensor


def make_case(
    num_tokens: int,
    hidden_size: int,
    vocab_size: int,
    *,
    padded: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    kind: str = "random",
    temperature: float = 1.0,
    objective: PolicyObjective | None = None,
    masked: float = 0.3,
    extras: bool = False,
    seed: int = 42,
) -> HeadCase:
    """Return a case whose targets are drawn from its own softmax, with some tokens clipped.

    `kind`: random logits of std about 2; peaked, std 12; negative, near -100. The latter two are
    multiples of 1/512, which fp32 holds exactly: a rounded logit of 100 is wrong by 4e-6.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    spread = {"random": 2.0, "peaked": 12.0, "negative": 2.0}[kind]
    hidden = normal(num_tokens, hidden_size)
    weight = normal(padded or vocab_size, hidden_size) * spread / hidden_size**0.5
    if kind == "negative":
        hidden[:, 0] = 64.0
        weight[:, 0] = -1.5
    if kind != "random":
        hidden, weight = (hidden * 8).round() / 8, (weight * 64).round() / 64
    hidden, weight = hidden.to(device, dtype), weight.to(device, dtype)
    with torch.no_grad():
        targets, logprobs = _sample(hidden, weight[:vocab_size], temperature, generator)
    loss_weights = (torch.rand(num_tokens, generator=generator) >= masked).float()
    loss_weights *= 0.5 + torch.rand(num_tokens, generator=generator)
    kwargs: dict[str, Any] = {
        "logprobs_old": logprobs + (0.25 * normal(num_tokens)).to(device),
        "advantages": normal(num_tokens).to(device),
        "loss_weights": (loss_weights / max(num_tokens, 1)).to(device),
        "objective": objective or PolicyObjective(),
        "temperature": temperature,
        "vocab_size": vocab_size,
    }
    if extras:
        kwargs["logprobs_ref"] = logprobs + (0.3 * normal(num_tokens)).to(device)
        weights = 0.5 + torch.rand(num_tokens, generator=generator)
        kwargs["importance_weights"] = weights.to(device)
    return HeadCase(hidden, weight, targets, kwargs)


def _sample(
    hidden: Tensor, weight: Tensor, temperature: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return targets drawn from the softmax, and their log-probs in fp32."""
    targets, logprobs = [], []
    for rows in hidden.split(64):
        log_p = (rows.float() @ weight.float().t() / temperature).log_softmax(-1)
        uniform = torch.rand(rows.shape[0], 1, generator=generator).to(log_p.device)
        drawn = (log_p.exp().cumsum(-1) < uniform).sum(-1, keepdim=True)
        drawn = drawn.clamp(max=log_p.shape[1] - 1)
        targets.append(drawn[:, 0])
        logprobs.append(log_p.gather(1, drawn)[:, 0])
    if not targets:
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    return torch.cat(targets), torch.cat(logprobs)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Return |got - expected| / |expected| in the Frobenius norm."""
    expected = expected.double()
    scale = expected.norm().item()
    error = (got.double() - expected).norm().item()
    return error / scale if scale else error


def loss_error(got: Tensor, case: HeadCase, expected: HeadReference) -> float:
    """Return the error of the loss relative to the sum of its terms' sizes."""
    size = (case.loss_weights * case.kwargs["advantages"]).abs().sum().item()
    return abs(got.item() - expected.loss.item()) / max(size, abs(expected.loss.item()), 1e-30)


def clip_counts(case: HeadCase, logprobs: Tensor) -> tuple[int, int, Tensor]:
    """Return how many tokens the paper's definition clips low, and high with probabilities."""
    kwargs, objective = case.kwargs, case.kwargs["objective"]
    ratio = (logprobs.double() - kwargs["logprobs_old"].double()).exp()
    chosen = kwargs["loss_weights"] != 0
    low = chosen & (kwargs["advantages"] < 0) & (ratio < 1 - objective.clip_low)
    high = chosen & (kwargs["advantages"] > 0) & (ratio > 1 + objective.clip_high)
    return int(low.sum()), int(high.sum()), logprobs.double().exp()[high]


def check_head(
    case: HeadCase, *, logprobs: float = 1e-5, **options: Any
) -> tuple[HeadResult, HeadReference]:
    """Compare loss, log-probs, clip decisions and gradients with fp64; return both results."""
    got, expected = case.run(**options), case.definition()
    is_bf16 = case.hidden.dtype == torch.bfloat16
    assert loss_error(got.output.loss, case, expected) <= (1e-5 if is_bf16 else 1e-6)
    got.assert_gradients(expected, 4e-3 if is_bf16 else 2e-6)
    assert (got.output.logprobs - expected.logprobs).abs().max() <= logprobs
    if case.kwargs["objective"].gate == "clip":
        low, high, of_high = clip_counts(case, expected.logprobs)
        assert (got.output.clip_low_count, got.output.clip_high_count) == (low, high)
        probability = of_high.sum().item()
        error = got.output.clip_high_probability_sum.item() - probability
        assert abs(error) <= logprobs * max(1.0, probability)
        largest = got.output.clip_high_probability_max.item()
        assert abs(largest - max(of_high.tolist(), default=0.0)) <= logprobs
    return got, expected
