"""Baselines of the policy head, each called as its authors intend, on the same inputs.

A baseline is a function from inputs to the scalar loss; the benchmark calls backward. Baselines are
optional packages (requirements/bench.txt); missing ones are listed as absent.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megadapo.algorithm.reference import token_losses
from megadapo.kernels.policy_head import policy_head_loss
from megadapo.lab.bench.head_inputs import NUM_SEQUENCES, HeadInputs

OURS = "megadapo"
PRODUCTS = "three products alone"

Loss = Callable[[HeadInputs], Tensor]


class AbsentError(Exception):
    """A baseline cannot run here; the message gives the reason."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A baseline; `prepare` imports it and returns its loss, or raises AbsentError."""

    name: str
    prepare: Callable[[torch.device], Loss]


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


def _ours(_: torch.device) -> Loss:
    def loss(inputs: HeadInputs) -> Tensor:
        return policy_head_loss(
            inputs.hidden,
            inputs.weight,
            inputs.targets,
            logprobs_old=inputs.logprobs_old,
            advantages=inputs.advantages,
            loss_weights=inputs.loss_weights,
            objective=inputs.objective,
            temperature=inputs.shape.temperature,
        ).loss

    return loss


def _compiled(_: torch.device) -> Loss:
    return torch.compile(eager_loss, dynamic=False)


def _torch_linear_cross_entropy(_: torch.device) -> Loss:
    return _linear_cross_entropy_loss(None)


def _torch_chunked_linear_cross_entropy(_: torch.device) -> Loss:
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is None:
        raise AbsentError(f"torch {torch.__version__} has no LinearCrossEntropyOptions")
    return _linear_cross_entropy_loss(options())


def _linear_cross_entropy_loss(options: object | None) -> Loss:
    """Return torch's own head: with `options` in chunks, otherwise with all logits at once."""
    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if function is None:
        raise AbsentError(f"torch {torch.__version__} has no F.linear_cross_entropy")

    def loss(inputs: HeadInputs) -> Tensor:
        _require_temperature_one(inputs)
        nll = function(
            inputs.hidden, inputs.weight, inputs.targets, reduction="none", options=options
        )
        return policy_loss(-nll, inputs)

    return loss


def _liger_grpo(device: torch.device) -> Loss:
    _require("liger-kernel")
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    def loss(inputs: HeadInputs) -> Tensor:
        objective = inputs.objective
        head = LigerFusedLinearGRPOLoss(
            beta=0.0,
            use_ref_model=False,
            loss_type="dapo",
            epsilon_low=objective.clip_low,
            epsilon_high=objective.clip_high,
            chunk_size=1,
            compiled=device.type == "cuda",
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

    return loss


def _liger_scaled_cross_entropy(_: torch.device) -> Loss:
    _require("liger-kernel")
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Function

    def loss(inputs: HeadInputs) -> Tensor:
        nll, _ = Function.apply(
            inputs.hidden,
            inputs.weight,
            inputs.targets,
            inputs.shape.temperature,
            -100,
            1,
            True,
        )
        return policy_loss(-nll, inputs)

    return loss


def _liger_triton_grpo(device: torch.device) -> Loss:
    _require("liger-kernel")
    _require_cuda(device)
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    def loss(inputs: HeadInputs) -> Tensor:
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

    return loss


def _verl_torch(_: torch.device) -> Loss:
    module = _load_file(
        "bench_verl_torch_functional",
        _package_folder("verl"),
        "utils/experimental",
        "torch_functional.py",
    )

    def loss(inputs: HeadInputs) -> Tensor:
        logprobs, _ = module.FusedLinearForPPOFunction.apply(
            inputs.hidden, inputs.weight, inputs.targets, inputs.shape.temperature, 512
        )
        return policy_loss(logprobs, inputs)

    return loss


def _verl_triton(device: torch.device) -> Loss:
    folder = _package_folder("verl")
    _require_cuda(device)
    _stub_verl_device_module()
    for name in ("kernels", "linear_cross_entropy"):
        module = _load_file(f"verl.utils.kernel.{name}", folder, "utils/kernel", f"{name}.py")

    def loss(inputs: HeadInputs) -> Tensor:
        logprobs, _ = module.linear_cross_entropy(
            inputs.hidden,
            inputs.weight,
            inputs.targets,
            float(inputs.shape.temperature),
            "none",
            None,
        )
        return policy_loss(logprobs, inputs)

    return loss


def _cut_cross_entropy(device: torch.device) -> Loss:
    _require("cut-cross-entropy")
    _require_cuda(device)
    from cut_cross_entropy import linear_cross_entropy

    def loss(inputs: HeadInputs) -> Tensor:
        _require_temperature_one(inputs)
        nll = linear_cross_entropy(
            inputs.hidden, inputs.weight, inputs.targets, reduction="none", impl="cce_exact"
        )
        return policy_loss(-nll, inputs)

    return loss


BASELINES = (
    Baseline(name=OURS, prepare=_ours),
    Baseline(name="eager torch", prepare=lambda _: eager_loss),
    Baseline(name="torch.compile", prepare=_compiled),
    Baseline(name="F.linear_cross_entropy", prepare=_torch_linear_cross_entropy),
    Baseline(name="F.linear_cross_entropy chunked", prepare=_torch_chunked_linear_cross_entropy),
    Baseline(name="Liger LigerFusedLinearGRPOLoss", prepare=_liger_grpo),
    Baseline(name="Liger FusedLinearScaledCrossEntropy", prepare=_liger_scaled_cross_entropy),
    Baseline(name="Liger triton_grpo_loss", prepare=_liger_triton_grpo),
    Baseline(name="verl FusedLinearForPPO", prepare=_verl_torch),
    Baseline(name="verl Triton linear_cross_entropy", prepare=_verl_triton),
    Baseline(name="CCE exact", prepare=_cut_cross_entropy),
)


def _require(distribution: str) -> None:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise AbsentError(f"{distribution} is not installed") from None


def _require_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise AbsentError("needs CUDA")


def _require_temperature_one(inputs: HeadInputs) -> None:
    if inputs.shape.temperature != 1.0:
        raise AbsentError("has no temperature")


def _package_folder(name: str) -> Path:
    """Return a package's folder without importing it and its dependencies."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise AbsentError(f"{name} is not installed")
    return Path(spec.submodule_search_locations[0])


def _load_file(name: str, folder: Path, *parts: str) -> types.ModuleType:
    path = folder.joinpath(*parts)
    if not path.exists():
        raise AbsentError(f"the installed package has no {'/'.join(parts)}")
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
