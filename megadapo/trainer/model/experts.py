"""Layers of experts in megatron-core: what configures them, and whose gradients are added up."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from megadapo.models.description import ModelDescription
from megadapo.trainer.config import TrainerConfig


def expert_options(model: ModelDescription, trainer: TrainerConfig) -> dict[str, Any]:
    """megatron-core's options of a model with experts; none for others."""
    if model.routing is None:
        return {}
    uses_te = torch.cuda.is_available()
    return {
        "num_moe_experts": model.shape.num_experts,
        "moe_ffn_hidden_size": model.shape.expert_ffn_size,
        "expert_model_parallel_size": trainer.expert_parallel,
        "expert_tensor_parallel_size": trainer.expert_tensor_parallel,
        "moe_router_topk": model.routing.experts_per_token,
        # the softmax over a token's own experts is that over all, divided by its sum over them
        "moe_router_pre_softmax": not model.routing.sums_to_one,
        # in bf16 the scores of many experts would be equal
        "moe_router_dtype": "fp32",
        # its own losses depend on how a batch is cut into micro-batches
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": uses_te,
        "moe_permute_fusion": uses_te,
    }


def mark_experts(chunk: GPTModel) -> None:
    """Have the gradients of experts added up over the ranks that hold the same ones.

    megatron-core 0.16 takes them for ordinary weights where no rank has other experts than the
    next, and would then leave out the tokens of the other tensor-parallel ranks. It is also what
    makes the optimizer's state the same at every split.
    """
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False


def forget_routing(chunk: GPTModel) -> None:
    """Let no layer keep a micro-batch's graph until the next one comes.

    megatron-core's dispatcher would, by the probabilities it dispatched. Gradient hooks hold the
    model from inside that graph, where Python's collector does not look: the model, and the threads
    of its process groups, would live for as long as the process.
    """
    for module in chunk.modules():
        if isinstance(module, MoELayer):
            module.register_forward_hook(_forget)


def _forget(layer: MoELayer, inputs: object, output: object) -> None:
    dispatcher = layer.token_dispatcher
    for name, value in list(vars(dispatcher).items()):
        if isinstance(value, Tensor) and value.requires_grad:
            setattr(dispatcher, name, None)
