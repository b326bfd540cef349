"""The definition's loss of a transformers model, one sequence at a time, in fp64."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from megadapo.algorithm.bapo import BapoConfig, bapo_sums, search_bounds
from megadapo.algorithm.covariance import choose_tokens
from megadapo.algorithm.importance import ImportanceConfig
from megadapo.algorithm.objective import COVARIANCE_GATES, PolicyObjective
from megadapo.algorithm.reference import policy_loss
from megadapo.data.batch import PackedBatch
from tests.support.trainer.batches import COVARIANCE_DRAW

BAPO = BapoConfig(target_share=0.435, low=(0.88, 0.98, 0.01), high=(1.01, 1.15, 0.01))
"""A grid over the few ratios of a tiny batch, and a target within it."""


def sequence_logprobs(
    model: torch.nn.Module, tokens: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """[n - 1] log-probs of tokens 1 to n - 1 of one sequence."""
    logits = model(tokens[None]).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1).gather(1, tokens[1:, None]).squeeze(1)


def load_wide(folder: Path, scale: float = 1.0) -> torch.nn.Module:
    """The folder's model in float64, after its float32 weights were multiplied."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter.float() * scale).double())
    return model


def sequences(batch: PackedBatch) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield places behind the first token, and the tokens, of each sequence of an update."""
    for index in batch.mini_batches[0]:
        start, stop = int(batch.cu_seqlens[index]), int(batch.cu_seqlens[index + 1])
        yield slice(start + 1, stop), torch.from_numpy(batch.tokens[start:stop])


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch: so little work is several times slower on threads that wait."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@one_thread()
def balance_loss(folder: Path, batch: PackedBatch) -> tuple[float, float, dict[str, np.ndarray]]:
    """Mean load-balancing loss of a layer, an expert's largest load, and the gradients."""
    model = load_wide(folder)
    logits: list[list[torch.Tensor]] = []
    for layer in model.model.layers:
        logits.append([])
        layer.mlp.gate.register_forward_hook(
            lambda module, inputs, output, kept=logits[-1]: kept.append(
                torch.nn.functional.linear(inputs[0].flatten(0, -2), module.weight)
            )
        )
    for _, tokens in sequences(batch):
        model(tokens[None])
    losses, loads = [], []
    for parts in logits:
        probabilities = torch.cat(parts).softmax(-1)
        num_experts = probabilities.shape[-1]
        chosen = probabilities.topk(model.config.num_experts_per_tok, -1).indices
        shares = torch.bincount(chosen.flatten(), minlength=num_experts) / chosen.numel()
        losses.append(num_experts * (shares * probabilities.mean(0)).sum())
        loads.append(num_experts * shares.max().item())
    total = torch.stack(losses).sum()
    total.backward()
    return total.item() / len(losses), max(loads), gradients_by_name(model)


def gradients_by_name(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Under the names of a model's folder, where each expert has matrices of its own."""
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    for name in [name for name in gradients if ".experts." in name]:
        prefix, kind = name.rsplit(".", 1)
        for expert, stacked in enumerate(gradients.pop(name)):
            parts = {"down_proj": stacked}
            if kind == "gate_up_proj":
                gate, up = np.split(stacked, 2)
                parts = {"gate_proj": gate, "up_proj": up}
            for part, gradient in parts.items():
                gradients[f"{prefix}.{expert}.{part}.weight"] = gradient
    return gradients


def batch_logprobs(folder: Path, batch: PackedBatch, dtype: torch.dtype) -> np.ndarray:
    """[T] log-probs of the response tokens, NaN on prompts."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    result = np.full(len(batch.tokens), np.nan)
    for index, prompt_length in enumerate(batch.prompt_lengths):
        start, stop = batch.cu_seqlens[index], batch.cu_seqlens[index + 1]
        with torch.no_grad():
            values = sequence_logprobs(model, torch.from_numpy(batch.tokens[start:stop]))
        result[start + prompt_length : stop] = values[prompt_length - 1 :].double().numpy()
    return result


def shift(places: slice, pace: float = 1.0) -> torch.Tensor:
    return 0.15 * torch.sin(pace * torch.arange(places.start, places.stop).double())


@one_thread()
def loss_and_gradients(
    folder: Path,
    batch: PackedBatch,
    objective: PolicyObjective | None = None,
    *,
    importance: ImportanceConfig | None = None,
    scale: float | None = None,
    teacher: Path | None = None,
    temperature: float = 1.0,
) -> tuple[float, dict[str, np.ndarray]]:
    """The first mini-batch's under an objective: the definition's loss of a dense model.

    Old log-probs are 0.15 sin(t) above the present ones, those of the reference 0.15 sin(0.7 t); or
    with a scale, the policy's weights are the folder's times that, and the reference's those. With
    a teacher the reference is that model. Logits of both are divided by the temperature.
    """
    objective, importance = objective or PolicyObjective(), importance or ImportanceConfig()
    has_reference = scale is not None or teacher is not None
    model = load_wide(folder, scale or 1.0)
    reference = load_wide(teacher or folder) if has_reference else model
    parts: list[tuple[torch.Tensor, ...]] = []
    for places, tokens in sequences(batch):
        log_p = (model(tokens[None]).logits[0, :-1] / temperature).log_softmax(-1)
        logprob = log_p.gather(1, tokens[1:, None])[:, 0]
        referred = logprob.detach() + shift(places, 0.7)
        if has_reference:
            with torch.no_grad():
                referred = sequence_logprobs(reference, tokens, temperature)
        entropy = -(log_p.exp() * log_p).sum(-1)
        advantages, weights = (
            torch.from_numpy(values[places]).double()
            for values in (batch.advantages, batch.loss_weights)
        )
        proximal = logprob.detach() + shift(places)
        stale, old = corrected(proximal, batch, places, importance)
        parts.append((logprob, old, advantages, weights, referred, entropy, stale))
    joined = map(torch.cat, zip(*parts, strict=True))
    logprob, old, advantages, weights, referred, entropy, stale = joined
    if objective.gate == "bapo":
        chosen = weights != 0
        ratios = (logprob.detach() - old).exp()[chosen]
        sums = bapo_sums(
            ratios, (advantages * weights)[chosen], BAPO, dual_clip=objective.dual_clip
        )
        objective = search_bounds(sums.numpy(), BAPO).put_into(objective)
    penalties = None
    if objective.gate in COVARIANCE_GATES:
        has_loss = (weights != 0).numpy()
        numbers = (one.detach().numpy()[has_loss] for one in (logprob, old, advantages))
        chosen = torch.zeros_like(weights)
        chosen[weights != 0] = torch.from_numpy(
            choose_tokens(*numbers, objective, draw=COVARIANCE_DRAW)
        ).double()
        penalties = objective.cov_coef * chosen if objective.gate == "kl_cov" else None
        advantages = advantages * (1.0 - chosen) if objective.gate == "clip_cov" else advantages
    loss = policy_loss(
        logprob,
        old,
        advantages,
        weights,
        torch.tensor([0, *np.cumsum([len(part[0]) for part in parts])]),
        objective=objective,
        logprobs_ref=referred,
        entropy=entropy,
        importance_weights=stale,
        penalties=penalties,
    )
    loss.backward()
    return loss.item(), gradients_by_name(model)


def corrected(
    proximal: torch.Tensor, batch: PackedBatch, tokens: slice, importance: ImportanceConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Importance weights and old log-probs of some tokens of one sequence, one after another."""
    present = batch.policy_versions.max()
    old, weights, gaps = proximal.clone(), torch.ones_like(proximal), {}
    for place, version in enumerate(batch.policy_versions[tokens]):
        rollout = float(batch.logprobs_rollout[tokens][place])
        stale = 0 <= version < present
        if stale and importance.stale_logprobs == "rollout":
            old[place] = rollout
        elif stale or (version == present and importance.scope == "all"):
            gaps[place] = float(proximal[place]) - rollout
    mean = sum(gaps.values()) / max(1, len(gaps))
    for place, gap in gaps.items():
        ratio = math.exp(gap if importance.level == "token" else mean)
        inside = importance.low <= ratio <= importance.high
        if not inside and importance.bound == "truncate":
            ratio = importance.low if ratio < importance.low else importance.high
        elif not inside and importance.bound == "mask":
            ratio = 0.0
        weights[place] = ratio
    return weights, old
