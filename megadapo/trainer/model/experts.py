"""Layers of experts in megatron-core: their options, and the loss that spreads tokens evenly.

For one layer with E experts the loss is E sum_i f_i P_i. f_i is the share of a step's choices that
went to expert i when its old log-probs were computed. P_i is the router's mean probability of it
over the tokens of an update. The loss is 1 if all experts get the same load. f_i is known before
the first update and the same on every rank, so the loss is a sum over tokens and does not depend
on the split. Source of the global f_i: Qiu et al., "Demons in the Detail" (arXiv 2501.11873).

Routers can use the experts that an engine chose, so that both compute a token alike. If two experts
are almost equally good, different rounding makes engine and trainer choose different ones, and
their log-probs come from different models. Replaying the engine's choices in log-prob passes and
updates avoids that. The weights of a token's experts are still the trainer's, and gradients reach
the routers through them. Source: "rollout routing replay" (R3), Ma et al., arXiv 2510.11370.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megadapo.data.batch import PackedBatch
from megadapo.errors import DataError
from megadapo.models.description import ModelDescription
from megadapo.trainer.config import TrainerConfig
from megadapo.trainer.model.megatron_internals import uses_transformer_engine
from megadapo.trainer.types import Metrics

Choose = Callable[..., tuple[Tensor, Tensor]]
"""A function from scores [T, E] to the best K scores and their experts, both [T, K]."""


def expert_options(model: ModelDescription, trainer: TrainerConfig) -> dict[str, Any]:
    """Return megatron-core's options for a model with experts; empty for other models."""
    if model.routing is None:
        return {}
    uses_te = uses_transformer_engine()
    return {
        "num_moe_experts": model.shape.num_experts,
        "moe_ffn_hidden_size": model.shape.expert_ffn_size,
        "expert_model_parallel_size": trainer.expert_parallel,
        "expert_tensor_parallel_size": trainer.expert_tensor_parallel,
        "moe_router_topk": model.routing.experts_per_token,
        # a softmax over a token's experts is the softmax over all, divided by its sum over them
        "moe_router_pre_softmax": not model.routing.sums_to_one,
        # in bf16 the scores of many experts would be equal
        "moe_router_dtype": "fp32",
        # megatron-core's losses depend on the split into micro-batches
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": uses_te,
        "moe_permute_fusion": uses_te,
    }


def mark_experts(chunk: GPTModel) -> None:
    """Mark experts, so that their gradients are summed over the ranks with the same experts.

    Without expert parallelism, megatron-core 0.16 treats them as ordinary weights and ignores the
    tokens of the other tensor-parallel ranks. The mark also makes the optimizer's state the same at
    every split.
    """
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False


def release_routing_graphs(chunk: GPTModel) -> None:
    """Make each layer of experts drop its references to a micro-batch's autograd graph.

    megatron-core's dispatcher keeps the dispatched probabilities and so the graph, whose gradient
    hooks refer to the model. Python's collector does not see this cycle: the model and the threads
    of its process groups would live as long as the process.
    """

    def forget(layer: MoELayer, inputs: object, output: object) -> None:
        dispatcher = layer.token_dispatcher
        for name, value in list(vars(dispatcher).items()):
            if isinstance(value, Tensor) and value.requires_grad:
                setattr(dispatcher, name, None)

    for module in chunk.modules():
        if isinstance(module, MoELayer):
            module.register_forward_hook(forget)


class BalancedRouter(TopKRouter):  # type: ignore[misc]  # megatron-core has no types
    """megatron-core's router, which can count its choices and has a load-balancing loss."""

    counts: Tensor | None = None
    """Choices and sums of probabilities so far, [2, E] fp64; None: not counted."""
    balance_weights: Tensor | None = None
    """Weights [E] of a token's probabilities in the balancing loss; None: no such loss."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return weights and choices of experts, both [T, E].

        Args:
            logits: [T, 1, E]; with sequence parallelism, of this rank's tokens.
            padding_mask: [T, 1] bool of all tokens or this rank's: tokens that do not count. They
                are routed like other tokens.
        """
        weights, chosen = super().routing(logits)
        balance_weights = self.balance_weights if torch.is_grad_enabled() else None
        if self.counts is None and balance_weights is None:
            return weights, chosen
        counted = _counted(len(weights), padding_mask)
        probabilities = logits.flatten(0, 1).softmax(-1, dtype=torch.float32)[counted]
        if self.counts is not None:
            self.counts[0] += chosen[counted].sum(0)
            self.counts[1] += probabilities.detach().sum(0, dtype=torch.float64)
        if balance_weights is not None:
            weights = MoEAuxLossAutoScaler.apply(weights, (probabilities * balance_weights).sum())
        return weights, chosen


def _counted(num_tokens: int, padding_mask: Tensor | None) -> Tensor | slice:
    if padding_mask is None:
        return slice(None)
    mask = padding_mask.flatten()
    if len(mask) > num_tokens:
        # only the first stage passes on the part of the mask for this rank's tokens
        mask = mask.narrow(0, mpu.get_tensor_model_parallel_rank() * num_tokens, num_tokens)
    return ~mask


class ExpertBalance:
    """Load balancing of one rank's routers; without experts its methods do nothing."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], *, coef: float) -> None:
        """`coef`: weight of the loss, which is a sum over layers."""
        config = chunks[0].config
        self._coef, self._topk = coef, config.moe_router_topk
        self._size = (config.num_layers, config.num_moe_experts or 0)
        self._routers: dict[int, BalancedRouter] = {
            module.layer_number - 1: module
            for chunk in chunks
            for module in chunk.modules()
            if isinstance(module, BalancedRouter)
        }
        self._shares = self._probabilities = torch.empty(0)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the routing in this block, over all ranks; the end of the block is collective."""
        for router in self._routers.values():
            router.counts = torch.zeros(
                2, self._size[1], dtype=torch.float64, device=router.weight.device
            )
        yield
        if not self._routers:
            return
        device = next(iter(self._routers.values())).weight.device
        counts = torch.zeros(2, *self._size, dtype=torch.float64, device=device)
        for layer, router in self._routers.items():
            assert router.counts is not None, "set above"
            counts[:, layer] = router.counts
            router.counts = None
        # every token is on one rank of each stage
        torch.distributed.all_reduce(counts)
        num_tokens = counts[0, 0].sum() / self._topk
        self._shares = counts[0] / (num_tokens * self._topk)
        self._probabilities = counts[1] / num_tokens

    def prepare(self, num_tokens: int) -> None:
        """Set the loss of the next update; `num_tokens`: of its sequences, on all ranks."""
        if self._coef == 0.0:
            return
        for layer, router in self._routers.items():
            balance_weights = self._shares[layer] * (self._coef * self._size[1] / num_tokens)
            router.balance_weights = balance_weights.float()

    def result(self) -> Metrics:
        """Return the balance in the last counted block; empty for a model without experts."""
        if not self._routers:
            return {}
        num_experts = self._size[1]
        losses = num_experts * (self._shares * self._probabilities).sum(-1)
        loads = num_experts * self._shares.amax(-1)
        return {
            "experts/balance_loss": losses.mean().item(),
            "experts/max_load": loads.max().item(),
        }


class ReplayedChoice:
    """The replayed choices of one router.

    It replaces megatron-core's `RouterReplay`, whose caller must say whether a layer is computed
    for the first or the second time.
    """

    def __init__(self) -> None:
        self._in_forward = self._has_gradient = False
        self._experts: Tensor | None = None
        self._recomputed: deque[Tensor | None] = deque()

    def begin(self, experts: Tensor | None) -> None:
        """Start a micro-batch's forward pass; `experts`: [T, K], None: the router chooses."""
        self._in_forward, self._has_gradient = True, torch.is_grad_enabled()
        self._experts = experts

    def end(self) -> None:
        """End the forward pass; calls before the next one recompute a layer for a backward pass."""
        self._in_forward, self._experts = False, None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Choose | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return scores and experts [T, K], best first: the replayed or the router's own choice."""
        assert default_compute_topk is not None, "megatron-core passes it"
        experts = self._next()
        if experts is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        if len(experts) != len(scores):
            # with sequence parallelism, a router has one rank's tokens
            start = mpu.get_tensor_model_parallel_rank() * len(scores)
            experts = experts.narrow(0, start, len(scores))
        experts = experts.to(scores.device, torch.int64)
        # in the order of the router's own choice, so that the same experts give the same bits
        order = scores.detach().gather(1, experts).argsort(dim=1, descending=True, stable=True)
        experts = experts.gather(1, order)
        return scores.gather(1, experts), experts

    def _next(self) -> Tensor | None:
        """Return the current pass's experts; backward passes have the order of the forward ones."""
        if not self._in_forward:
            return self._recomputed.popleft()
        if self._has_gradient and not torch.is_grad_enabled():
            # activation checkpointing will compute this layer again
            self._recomputed.append(self._experts)
        return self._experts


def replay_choices(chunk: GPTModel) -> None:
    """Let the chunk's routers use the `experts` of each forward pass's micro-batch."""
    choices: dict[int, ReplayedChoice] = {}
    for module in chunk.modules():
        if isinstance(module, TopKRouter):
            module.router_replay = choices[module.layer_number - 1] = ReplayedChoice()

    def begin(_module: GPTModel, _args: object, inputs: dict[str, Any]) -> None:
        experts = inputs["output_processor_context"].experts
        for layer, choice in choices.items():
            choice.begin(None if experts is None else experts[:, layer])

    def end(_module: GPTModel, _args: object, _output: object) -> None:
        for choice in choices.values():
            choice.end()

    chunk.register_forward_pre_hook(begin, with_kwargs=True)
    chunk.register_forward_hook(end)


def check_choices(batch: PackedBatch, model: ModelDescription) -> None:
    """Raise DataError unless every token that predicts a trained one has experts of this model."""
    assert model.routing is not None, "checked with the configuration"
    if not batch.experts:
        raise DataError(
            "trainer.router_replay needs the experts that engines chose, and some responses have "
            "no experts: they were sampled without trainer.router_replay"
        )
    sizes = (model.shape.num_layers, model.routing.experts_per_token)
    trained = np.flatnonzero(batch.loss_weights)
    bounds = np.searchsorted(trained, batch.cu_seqlens)
    for index, experts in enumerate(batch.experts):
        start, stop = batch.cu_seqlens[index : index + 2]
        own = trained[bounds[index] : bounds[index + 1]]
        least = max(1, own[-1] - start if len(own) else 0)
        if experts.shape[1:] != sizes or not least <= len(experts) <= stop - start:
            raise DataError(
                f"sequence {index} of the batch has experts of the shape {list(experts.shape)}; it "
                f"must be [{least} to {stop - start} tokens, {sizes[0]} layers, {sizes[1]} experts "
                "per token]"
            )
        if experts.max() >= model.shape.num_experts:
            raise DataError(
                f"sequence {index} of the batch goes to expert {experts.max()}, but the model has "
                f"{model.shape.num_experts} in each layer"
            )
