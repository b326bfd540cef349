"""How evenly tokens are spread over the experts of each layer, and the loss that evens it out.

Of one layer with E experts the loss is E sum_i f_i P_i: f_i is the share of a step's choices that
fell on expert i when its old log-probs were taken, P_i the mean probability the router gives it
over the tokens of an update. It is 1 where all experts get as much. f_i is known before the first
update and the same on every rank, so the loss is a sum over tokens and the split does not matter.
Source of the global f_i: Qiu et al., "Demons in the Detail" (arXiv 2501.11873).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megadapo.trainer.result import ExpertResult


class BalancedRouter(TopKRouter):  # type: ignore[misc]  # megatron-core has no types
    """megatron-core's router, which counts its choices when asked to, and can be pulled."""

    counts: Tensor | None = None  # [2, E] fp64 choices and sums of probabilities; None: not counted
    pull: Tensor | None = None
    """[E] what a token's probability of each expert adds to the loss; None: nothing."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights and choices of experts, both [T, E].

        Args:
            logits: [T, 1, E], with sequence parallelism of this rank's tokens.
            padding_mask: [T, 1] bool of all tokens or of this rank's, which of them are not to be
                counted; they are routed like any other.
        """
        weights, chosen = super().routing(logits)
        pull = self.pull if torch.is_grad_enabled() else None
        if self.counts is None and pull is None:
            return weights, chosen
        counted = _counted(len(weights), padding_mask)
        probabilities = logits.flatten(0, 1).softmax(-1, dtype=torch.float32)[counted]
        if self.counts is not None:
            self.counts[0] += chosen[counted].sum(0)
            self.counts[1] += probabilities.detach().sum(0, dtype=torch.float64)
        if pull is not None:
            weights = MoEAuxLossAutoScaler.apply(weights, (probabilities * pull).sum())
        return weights, chosen


def _counted(num_tokens: int, padding_mask: Tensor | None) -> Tensor | slice:
    if padding_mask is None:
        return slice(None)
    mask = padding_mask.flatten()
    if len(mask) > num_tokens:
        # only the first stage hands on the part of a mask that belongs to this rank's tokens
        mask = mask.narrow(0, mpu.get_tensor_model_parallel_rank() * num_tokens, num_tokens)
    return ~mask


class ExpertBalance:
    """The routers of one rank; does nothing for a model without experts."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], *, coef: float) -> None:
        """`coef`: of the loss, whose layers are added up."""
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
        """Count what is routed in here, over all ranks; collective at its end."""
        for router in self._routers.values():
            router.counts = torch.zeros(
                2, self._size[1], dtype=torch.float64, device=router.weight.device
            )
        yield
        if self._routers:
            self._add_up()

    def _add_up(self) -> None:
        device = next(iter(self._routers.values())).weight.device
        counts = torch.zeros(2, *self._size, dtype=torch.float64, device=device)
        for layer, router in self._routers.items():
            assert router.counts is not None, "a router that has counted"
            counts[:, layer] = router.counts
            router.counts = None
        # every token is on one rank of each stage
        torch.distributed.all_reduce(counts)
        num_tokens = counts[0, 0].sum() / self._topk
        self._shares = counts[0] / (num_tokens * self._topk)
        self._probabilities = counts[1] / num_tokens

    def prepare(self, num_tokens: int) -> None:
        """Pull the routers in the next update; `num_tokens`: of its sequences, on all ranks."""
        if self._coef == 0.0:
            return
        for layer, router in self._routers.items():
            pull = self._shares[layer] * (self._coef * self._size[1] / num_tokens)
            router.pull = pull.float()

    def result(self) -> ExpertResult:
        """Of what was counted last."""
        if not self._routers:
            return ExpertResult()
        num_experts = self._size[1]
        losses = num_experts * (self._shares * self._probabilities).sum(-1)
        loads = num_experts * self._shares.amax(-1)
        return ExpertResult(balance_loss=losses.mean().item(), max_load=loads.max().item())
