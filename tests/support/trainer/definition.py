"""DAPO's loss written out on a transformers model, one sequence at a time, in fp64."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from megadapo.algorithm.bapo import BapoConfig, bapo_sums, search_bounds
from megadapo.algorithm.importance import ImportanceConfig
from megadapo.algorithm.objective import PolicyObjective
from megadapo.algorithm.reference import policy_loss
from megadapo.data.batch import PackedBatch


def sequence_logprobs(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """[n - 1] log-probs of tokens 1 to n - 1 of one sequence."""
    logits = model(tokens[None]).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, tokens[1:, None]).squeeze(1)


def load_wide(folder: Path) -> torch.nn.Module:
    """The folder's model in float64."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )


def balance_loss(folder: Path, batch: PackedBatch) -> tuple[float, float, dict[str, np.ndarray]]:
    """Load-balancing loss of the first mini-batch, mean over layers; the most tokens of an expert
    against its layer's mean; and the gradients of the loss added up over the layers."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = load_wide(folder)
    logits: dict[int, list[torch.Tensor]] = {}
    for number, layer in enumerate(model.model.layers):
        kept = logits.setdefault(number, [])
        layer.mlp.gate.register_forward_hook(
            lambda module, inputs, output, kept=kept: kept.append(
                torch.nn.functional.linear(inputs[0].flatten(0, -2), module.weight)
            )
        )
    for index in batch.mini_batches[0]:
        start, stop = int(batch.cu_seqlens[index]), int(batch.cu_seqlens[index + 1])
        model(torch.from_numpy(batch.tokens[start:stop])[None])
    losses, loads = [], []
    for parts in logits.values():
        probabilities = torch.cat(parts).softmax(-1)
        num_experts = probabilities.shape[-1]
        chosen = probabilities.topk(model.config.num_experts_per_tok, -1).indices
        shares = torch.bincount(chosen.flatten(), minlength=num_experts) / chosen.numel()
        losses.append(num_experts * (shares * probabilities.mean(0)).sum())
        loads.append(num_experts * shares.max().item())
    total = torch.stack(losses).sum()
    total.backward()
    torch.set_num_threads(num_threads)
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


def loss_and_gradients(
    folder: Path, batch: PackedBatch, importance: ImportanceConfig | None = None
) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of the first mini-batch, with old log-probs shifted by 0.15 sin(t)."""
    importance = importance or ImportanceConfig()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so little work is several times slower on threads that wait
    model = load_wide(folder)
    total = torch.zeros((), dtype=torch.float64)
    for index in batch.mini_batches[0]:
        start, stop = int(batch.cu_seqlens[index]), int(batch.cu_seqlens[index + 1])
        logprobs = sequence_logprobs(model, torch.from_numpy(batch.tokens[start:stop]))
        places = torch.arange(start + 1, stop)
        old = logprobs.detach() + 0.15 * torch.sin(places.double())
        weight, old = corrected(old, batch, slice(start + 1, stop), importance)
        ratio = (logprobs - old).exp()
        advantages = torch.from_numpy(batch.advantages[start + 1 : stop]).double()
        weights = torch.from_numpy(batch.loss_weights[start + 1 : stop]).double()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
        total = total - (weights * weight * surrogate).sum()
    total.backward()
    torch.set_num_threads(num_threads)
    return total.item(), gradients_by_name(model)


def loss_and_gradients_of(
    folder: Path,
    batch: PackedBatch,
    objective: PolicyObjective,
    bapo: BapoConfig,
    *,
    scale: float | None = None,
) -> tuple[float, dict[str, np.ndarray]]:
    """The first mini-batch's under an objective: the definition's loss of a dense model.

    Old log-probs are 0.15 sin(t) above the present ones, those of the reference 0.15 sin(0.7 t); or
    with a scale, the policy's weights are the folder's times that, and the reference's those.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model, reference = scaled_model(folder, scale or 1.0), scaled_model(folder, 1.0)
    places, logprobs, entropies, lengths, referred = [], [], [], [], []
    for index in batch.mini_batches[0]:
        start, stop = int(batch.cu_seqlens[index]), int(batch.cu_seqlens[index + 1])
        log_p = model(torch.from_numpy(batch.tokens[start:stop])[None]).logits[0, :-1]
        log_p = log_p.log_softmax(-1)
        targets = torch.from_numpy(batch.tokens[start + 1 : stop])[:, None]
        places.append(torch.arange(start + 1, stop))
        logprobs.append(log_p.gather(1, targets)[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
        lengths.append(stop - start - 1)
        if scale is not None:
            with torch.no_grad():
                tokens = torch.from_numpy(batch.tokens[start:stop])
                referred.append(sequence_logprobs(reference, tokens))
    at, logprob = torch.cat(places), torch.cat(logprobs)
    old = logprob.detach() + 0.15 * torch.sin(at.double())
    advantages = torch.from_numpy(batch.advantages).double()[at]
    weights = torch.from_numpy(batch.loss_weights).double()[at]
    if objective.gate == "bapo":
        chosen = weights != 0
        ratios = (logprob.detach() - old).exp()[chosen]
        sums = bapo_sums(ratios, advantages[chosen], bapo)
        objective = search_bounds(sums.numpy(), bapo).put_into(objective)
    made_up = logprob.detach() + 0.15 * torch.sin(0.7 * at.double())
    loss = policy_loss(
        logprob,
        old,
        advantages,
        weights,
        torch.tensor([0, *np.cumsum(lengths)]),
        objective=objective,
        logprobs_ref=torch.cat(referred) if referred else made_up,
        entropy=torch.cat(entropies),
    )
    loss.backward()
    torch.set_num_threads(num_threads)
    return loss.item(), gradients_by_name(model)


def scaled_model(folder: Path, scale: float) -> torch.nn.Module:
    """The folder's model in float64, after its float32 weights were multiplied."""
    model = load_wide(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter.float() * scale).double())
    return model


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
