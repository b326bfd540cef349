"""Routers that use the experts an engine chose, so that both compute a token alike.

If two experts are almost equally good, different rounding makes engine and trainer choose
different ones, and their log-probs come from different models. Replaying the engine's choices in
log-prob passes and updates avoids that. The weights of a token's experts are still the trainer's,
and gradients reach the routers through them. Source: "rollout routing replay" (R3), Ma et al.,
arXiv 2510.11370.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megadapo.data.batch import PackedBatch
from megadapo.errors import DataError
from megadapo.models.description import ModelDescription

Choose = Callable[..., tuple[Tensor, Tensor]]
"""A function from scores [T, E] to the best K scores and their experts, both [T, K]."""


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
    """Check that every token that predicts a trained one has experts of this model.

    Raises:
        DataError: a sequence has no experts, or those of another model.
    """
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
