"""Layers of experts in megatron-core: their options, and the loss that spreads tokens evenly.

For one layer with E experts the loss is E sum_i f_i P_i. f_i is the share of a step's choices that
went to expert i when its old log-probs were computed. P_i is the router's mean probability of it
over the tokens of an update. The loss is 1 if all experts get the same load. f_i is known before
the first update and the same on every rank, so the loss is a sum over tokens and does not depend
on the split. Source of the global f_i: Qiu et al., "Demons in the Detail" (arXiv 2501.11873).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megadapo.models.description import ModelDescription
from megadapo.trainer.config import TrainerConfig
from megadapo.trainer.model.megatron_internals import uses_transformer_engine
from megadapo.trainer.types import Metrics


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
