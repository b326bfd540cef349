"""Routers that take over the experts an engine chose, so that both compute a token alike.

Where two experts are nearly as good, an engine and a trainer that round differently choose
differently, and the token's log-probs are then of two models. With the engine's choices replayed
in the log-prob passes and in the updates, only the weights of a token's experts are the trainer's,
and gradients reach the routers through those. Source: "rollout routing replay" (R3), Ma et al.,
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
"""A router's own choice: from scores [T, E] the best K and their experts, both [T, K]."""


class ReplayedChoice:
    """What one router is told; stands where megatron-core has its own `RouterReplay`, which is told
    by the caller whether a layer is computed for the first or for the second time."""

    def __init__(self) -> None:
        self._in_forward = self._has_gradient = False
        self._experts: Tensor | None = None
        self._recomputed: deque[Tensor | None] = deque()

    def begin(self, experts: Tensor | None) -> None:
        """A micro-batch's forward pass begins; `experts`: [T, K] of it, None: the router's own."""
        self._in_forward, self._has_gradient = True, torch.is_grad_enabled()
        self._experts = experts

    def end(self) -> None:
        """It is over: what comes before the next one is computed again for a backward pass."""
        self._in_forward, self._experts = False, None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Choose | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and experts [T, K], best first: the told experts', or the router's own choice."""
        assert default_compute_topk is not None, "megatron-core passes it"
        experts = self._next()
        if experts is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        experts = _of_this_rank(experts, len(scores)).to(scores.device, torch.int64)
        # in the order of a choice of one's own, so that the same experts give the same bits
        order = scores.detach().gather(1, experts).argsort(dim=1, descending=True, stable=True)
        experts = experts.gather(1, order)
        return scores.gather(1, experts), experts

    def _next(self) -> Tensor | None:
        """Of the pass that is under way; backward passes come in the order of the forward ones."""
        if not self._in_forward:
            return self._recomputed.popleft()
        if self._has_gradient and not torch.is_grad_enabled():
            # activation checkpointing keeps nothing of this layer, and will compute it again
            self._recomputed.append(self._experts)
        return self._experts


def replay_choices(chunk: GPTModel) -> None:
    """Have the chunk's routers take over the `experts` of the task that each forward pass is of."""
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
    """Check that every token that predicts one with a loss has experts, and that they exist.

    Raises:
        DataError: a sequence has none, or not of this model.
    """
    assert model.routing is not None, "checked with the configuration"
    if not batch.experts:
        raise DataError(
            "trainer.router_replay needs the experts that engines chose, and some responses have "
            "none: they were sampled without trainer.router_replay"
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


def _of_this_rank(experts: Tensor, num_tokens: int) -> Tensor:
    """With sequence parallelism the router has the tokens of one tensor-parallel rank."""
    if len(experts) == num_tokens:
        return experts
    return experts.narrow(0, mpu.get_tensor_model_parallel_rank() * num_tokens, num_tokens)
