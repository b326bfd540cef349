"""Baselines of the policy head, each called as its authors intend, on the same inputs.

A baseline is a function from inputs to the scalar loss; the benchmark calls backward. It raises
AbsentError if its package (requirements/bench.txt) or device is missing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from baselines.head_inputs import NUM_SEQUENCES, OURS, HeadInputs, Loss, ours
from megadapo.algorithm.reference import token_losses


class AbsentError(Exception):
    """A baseline cannot run here; the message gives the reason."""


def policy_loss(logprobs: Tensor, inputs: HeadInputs) -> Tensor:
    """Compute DAPO's loss from log-probs in plain torch, for baselines without a loss."""
    losses = token_losses(
        logprobs.float(), inputs.logprobs_old, inputs.advantages, objective=inputs.objective
    )
    return (inputs.loss_weights * losses).sum()


def eager_loss(inputs: HeadInputs) -> Tensor:
    """Compute the loss as trainers without a fused head do: all logits, widened to fp32."""
    logits = (inputs.hidden @ inputs.weight.t()).float() / inputs.shape.temperature
    logprobs = logits.gather(1, inputs.targets[:, None])[:, 0] - logits.logsumexp(-1)
    return policy_loss(logprobs, inputs)


def compiled_loss(inputs: HeadInputs) -> Tensor:
    return _compiled()(inputs)


@cache
def _compiled() -> Loss:
    return torch.compile(eager_loss, dynamic=False)


def torch_loss(
    inputs: HeadInputs, options: torch.nn.LinearCrossEntropyOptions | None = None
) -> Tensor:
    """Compute the loss with torch's own head; all logits at once without options."""
    _require_temperature_one(inputs)
    nll = torch.nn.functional.linear_cross_entropy(
        inputs.hidden, inputs.weight, inputs.targets, reduction="none", options=options
    )
    return policy_loss(-nll, inputs)


def torch_chunked_loss(inputs: HeadInputs) -> Tensor:
    return torch_loss(inputs, torch.nn.LinearCrossEntropyOptions())


def liger_grpo_loss(inputs: HeadInputs) -> Tensor:
    _require("liger-kernel")
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    head = LigerFusedLinearGRPOLoss(
        beta=0.0,
        use_ref_model=False,
        loss_type="dapo",
        epsilon_low=inputs.objective.clip_low,
        epsilon_high=inputs.objective.clip_high,
        chunk_size=1,
        compiled=inputs.hidden.is_cuda,
        temperature=inputs.shape.temperature,
    )
    targets = inputs.targets.view(NUM_SEQUENCES, -1)
    value: Tensor
    value, _ = head(
        inputs.hidden.view(*targets.shape, -1),
        inputs.weight,
        targets,
        torch.ones_like(targets, dtype=torch.float32),
        inputs.sequence_advantages,
        old_per_token_logps=inputs.logprobs_old.view(targets.shape),
    )
    return value


def liger_scaled_loss(inputs: HeadInputs) -> Tensor:
    _require("liger-kernel")
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Function

    temperature = inputs.shape.temperature
    nll, _ = Function.apply(
        inputs.hidden, inputs.weight, inputs.targets, temperature, -100, 1, True
    )
    return policy_loss(-nll, inputs)


def liger_triton_loss(inputs: HeadInputs) -> Tensor:
    _require("liger-kernel")
    _require_cuda(inputs)
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    targets = inputs.targets.view(NUM_SEQUENCES, -1)
    # it takes one more position per sequence than it scores
    hidden = inputs.hidden.view(*targets.shape, -1)
    hidden = torch.cat([hidden, hidden[:, -1:]], dim=1)
    value: Tensor
    value, *_ = triton_grpo_loss(
        hidden @ inputs.weight.t(),
        inputs.logprobs_old.view(targets.shape),
        None,
        targets,
        inputs.sequence_advantages,
        torch.ones_like(targets),
        inputs.shape.temperature,
        beta=0.0,
        eps_low=inputs.objective.clip_low,
        eps_high=inputs.objective.clip_high,
        inplace=True,
        loss_type="dapo",
        reduce=True,
    )
    return value


def verl_torch_loss(inputs: HeadInputs) -> Tensor:
    module = _load_file("bench_verl_torch_functional", "utils/experimental/torch_functional.py")
    logprobs, _ = module.FusedLinearForPPOFunction.apply(
        inputs.hidden, inputs.weight, inputs.targets, inputs.shape.temperature, 512
    )
    return policy_loss(logprobs, inputs)


def verl_triton_loss(inputs: HeadInputs) -> Tensor:
    linear_cross_entropy = _verl_triton(inputs.hidden.is_cuda)
    temperature = float(inputs.shape.temperature)
    logprobs, _ = linear_cross_entropy(
        inputs.hidden, inputs.weight, inputs.targets, temperature, "none", None
    )
    return policy_loss(logprobs, inputs)


@cache
def _verl_triton(has_cuda: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return verl's Triton head; its module needs a stub of verl.utils.device."""
    _verl_folder()
    if not has_cuda:
        raise AbsentError("needs CUDA")
    _stub_verl_device_module()
    for name in ("kernels", "linear_cross_entropy"):
        module = _load_file(f"verl.utils.kernel.{name}", f"utils/kernel/{name}.py")
    function: Callable[..., tuple[Tensor, Tensor]] = module.linear_cross_entropy
    return function


def cut_cross_entropy_loss(inputs: HeadInputs) -> Tensor:
    _require("cut-cross-entropy")
    _require_cuda(inputs)
    from cut_cross_entropy import linear_cross_entropy

    _require_temperature_one(inputs)
    nll = linear_cross_entropy(
        inputs.hidden, inputs.weight, inputs.targets, reduction="none", impl="cce_exact"
    )
    return policy_loss(-nll, inputs)


def quack_loss(inputs: HeadInputs) -> Tensor:
    """Compute the loss with quack's cross entropy over all logits.

    Its chunked heads reduce the tokens to a sum or mean, so they have no place for DAPO's loss.
    """
    _require("quack-kernels")
    _require_cuda(inputs)
    from quack.linear_cross_entropy import linear_cross_entropy_func

    _require_temperature_one(inputs)
    nll = linear_cross_entropy_func(
        inputs.hidden,
        inputs.weight,
        None,
        inputs.targets,
        reduction="none",
        inplace_backward=True,
    )
    return policy_loss(-nll, inputs)


def quack_sum(inputs: HeadInputs) -> Tensor:
    """Compute the sum of log-probs with quack's fastest head, which is less than DAPO's loss."""
    _require("quack-kernels")
    _require_cuda(inputs)
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    _require_temperature_one(inputs)
    value: Tensor = chunked_linear_cross_entropy(
        inputs.hidden, inputs.weight, inputs.targets, reduction="sum"
    )
    return value


BASELINES: dict[str, Loss] = {
    OURS: ours,
    "eager torch": eager_loss,
    "torch.compile": compiled_loss,
    "F.linear_cross_entropy": torch_loss,
    "F.linear_cross_entropy chunked": torch_chunked_loss,
    "Liger LigerFusedLinearGRPOLoss": liger_grpo_loss,
    "Liger FusedLinearScaledCrossEntropy": liger_scaled_loss,
    "Liger triton_grpo_loss": liger_triton_loss,
    "verl FusedLinearForPPO": verl_torch_loss,
    "verl Triton linear_cross_entropy": verl_triton_loss,
    "CCE exact": cut_cross_entropy_loss,
    "quack linear_cross_entropy": quack_loss,
    "quack chunked, log-probs only": quack_sum,
}
OTHER_LOSSES = ("quack chunked, log-probs only",)
"""Baselines with an easier loss than DAPO's; their errors are not measured."""


@cache
def _require(distribution: str) -> None:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise AbsentError(f"{distribution} is not installed") from None


def _require_cuda(inputs: HeadInputs) -> None:
    if not inputs.hidden.is_cuda:
        raise AbsentError("needs CUDA")


def _require_temperature_one(inputs: HeadInputs) -> None:
    if inputs.shape.temperature != 1.0:
        raise AbsentError("has no temperature")


def _verl_folder() -> Path:
    """Return verl's folder without importing it and its dependencies."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise AbsentError("verl is not installed")
    return Path(spec.submodule_search_locations[0])


@cache
def _load_file(name: str, file: str) -> types.ModuleType:
    """Import one file of verl as a module of this name."""
    path = _verl_folder() / file
    if not path.exists():
        raise AbsentError(f"the installed package has no {file}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _stub_verl_device_module() -> None:
    """Replace verl.utils.device, which verl's kernel imports and which needs all of verl."""
    device = types.ModuleType("verl.utils.device")
    vars(device).update(
        is_cuda_available=True,
        get_device_capability=torch.cuda.get_device_capability,
        get_device_name=lambda: "cuda",
        get_torch_device=lambda: torch.cuda,
    )
    for name in ("verl", "verl.utils", "verl.utils.kernel"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["verl.utils.device"] = device
    vars(sys.modules["verl.utils.kernel"])["kernels"] = None
