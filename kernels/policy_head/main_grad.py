"""Handing a weight gradient over in Megatron's gradient-accumulation convention.

Megatron's DistributedDataParallel gives every parameter an accumulator `main_grad`. Who adds to
it himself sets `grad_added_to_main_grad` and still returns a gradient, so that the hook runs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def main_grad_of(weight: Tensor) -> Tensor | None:
    """Megatron's own gradient accumulator of this parameter, if it has one."""
    return getattr(weight, "main_grad", None)


def is_known_one(scale: Tensor) -> bool:
    """Whether a scale is 1, where looking costs nothing; on a device it would be a sync."""
    return scale.device.type == "cpu" and scale.item() == 1.0


def hand_over(weight: Tensor, d_weight: Tensor, scale: Tensor) -> Tensor | None:
    """Add scale * d_weight to main_grad, or return it where the parameter has none."""
    if not is_known_one(scale):
        d_weight = d_weight.mul_(scale)
    main_grad = main_grad_of(weight)
    if main_grad is None:
        return d_weight.to(weight.dtype)
    main_grad.add_(d_weight)
    return stand_in(weight)


def stand_in(weight: Tensor) -> Tensor | None:
    """What autograd gets once main_grad holds a parameter's gradient.

    It still needs some gradient, so that Megatron's hook runs on the backward thread: its content
    is not read, unless the parameter says `zero_out_wgrad`, as a tied embedding does, whose own
    gradient is added to it.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)
