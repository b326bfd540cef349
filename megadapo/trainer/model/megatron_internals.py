"""All uses of megatron-core's internals, tested on 0.16.1 and 0.19.2.

- `GPTModel.output_processor`: present since 0.18, emulated for 0.16.
- Layer specs: later versions describe a part by a partial instead of a spec.
- The product that adds a weight's gradient to fp32 sums, by torch where apex is missing.
- The distributed optimizer: the runs of elements that a rank owns, its count of updates, and a step
  with a known gradient norm.

`cpu_platform.py` replaces the CUDA functions that megatron-core calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.tensor_parallel import layers as parallel_layers
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megadapo.kernels.policy_head.products import Fp32Sum

if not hasattr(moe_utils, "te_general_gemm"):
    # 0.16 reads this name also without Transformer Engine, and does not define it then
    moe_utils.te_general_gemm = None


def uses_transformer_engine() -> bool:
    """Return whether layers come from Transformer Engine: on GPUs, where it is installed."""
    return torch.cuda.is_available() and transformer_engine.HAVE_TE


def sum_gradients_by_torch() -> None:
    """Give megatron-core a product that adds to fp32 sums of weight gradients; apex's goes first.

    Without it each micro-batch's gradient would be rounded to bf16 before it is added.
    """
    if not parallel_layers._grad_accum_fusion_available:
        product = SimpleNamespace(wgrad_gemm_accum_fp32=_add_gradient)
        parallel_layers.fused_weight_gradient_mlp_cuda = product
        parallel_layers._grad_accum_fusion_available = True


def _add_gradient(inputs: Tensor, d_outputs: Tensor, main_grad: Tensor) -> None:
    """Add d_outputs [T, N]^T inputs [T, K] to main_grad [N, K] fp32."""
    Fp32Sum(main_grad.shape, inputs, into=main_grad).add(d_outputs, inputs)


class _GPTModelWithHook(GPTModel):  # type: ignore[misc]  # megatron-core has no types
    """GPTModel of 0.16 with the `output_processor` of later versions."""

    def forward(
        self,
        *args: Any,
        output_processor: Callable[..., Any],
        output_processor_context: object,
        **kwargs: Any,
    ) -> Any:
        self._processor = output_processor
        self._processor_context = output_processor_context
        return super().forward(*args, **kwargs)

    def _postprocess(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        if not self.post_process:
            return hidden_states
        weight = None
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        return self._processor(
            hidden_states=hidden_states,
            output_layer=self.output_layer,
            output_weight=weight,
            context=self._processor_context,
        )


_HAS_HOOK = "output_processor" in inspect.signature(GPTModel.forward).parameters
HookedGPTModel = GPTModel if _HAS_HOOK else _GPTModelWithHook


def submodules_of(part: ModuleSpec | partial[Any]) -> Any:
    """Return the submodules of a layer's part, which is a spec or, in later versions, a partial."""
    return part.keywords["submodules"] if isinstance(part, partial) else part.submodules


def optimizer_state_of(
    optimizer: MegatronOptimizer,
) -> Iterator[tuple[Tensor, int, int, dict[str, Tensor]]]:
    """Yield the run of elements that this rank updates, for every parameter that has one.

    Yield the parameter, the run's first and last (excluded) element, and flat views of the run's
    master ("fp32_param") and moments by name.
    """
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        for buffer in part.gbuf_ranges:
            for bucket in (bucket for buckets in buffer.values() for bucket in buckets):
                for parameter, ranges in bucket["param_map"].items():
                    tensors = part._get_main_param_and_optimizer_states(parameter)
                    state = {
                        "fp32_param" if name == "param" else name: value.detach().view(-1)
                        for name, value in tensors.items()
                        if isinstance(value, Tensor) and name != "step"
                    }
                    yield parameter, ranges["param"].start, ranges["param"].end, state


def allocate_moments(optimizer: MegatronOptimizer) -> None:
    """Create zero moments, which optimizers create in the first step, too late for a checkpoint.

    megatron-core's own `load_state_dict` would leave them uninitialized. With the hybrid optimizer,
    it would apply an update with random gradients.
    """
    for part in optimizer.chained_optimizers:
        for inner in _inner_optimizers(part):
            pairs = ((group, param) for group in inner.param_groups for param in group["params"])
            for group, param in pairs:
                state = inner.state[param]
                if isinstance(inner, torch.optim.AdamW):
                    # the fused AdamW reads the count where the parameter is
                    place = param.device if group["fused"] else None
                    state["step"] = torch.zeros((), dtype=torch.float32, device=place)
                state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg_sq"] = torch.zeros_like(param)
        if hasattr(part.optimizer, "sub_optimizers"):
            part.optimizer._sync_sub_optimizers_state_to_hdo()


def num_updates(optimizer: MegatronOptimizer) -> int:
    """Return the number of updates that this rank's optimizer has applied; 0 without parameters.

    torch's AdamW counts per parameter, Transformer Engine's per group.
    """
    counts = [0]
    for part in optimizer.chained_optimizers:
        for inner in _inner_optimizers(part):
            counts += [int(state["step"]) for state in inner.state.values() if "step" in state]
            counts += [int(group["step"]) for group in inner.param_groups if "step" in group]
    return max(counts)


def set_num_updates(optimizer: MegatronOptimizer, count: int) -> None:
    """Set the number of updates, which Adam's bias correction uses."""
    for part in optimizer.chained_optimizers:
        for inner in _inner_optimizers(part):
            states = [state for state in inner.state.values() if "step" in state]
            for state in states:
                state["step"].fill_(count)
            if not states:
                for group in inner.param_groups:
                    group["step"] = count


def _inner_optimizers(part: Any) -> list[torch.optim.Optimizer]:
    """Return torch's optimizers of a part: the hybrid optimizer has several, a stub has none."""
    if part.is_stub_optimizer:
        return []
    return list(getattr(part.optimizer, "sub_optimizers", [part.optimizer]))


def param_groups(part: Any) -> list[dict[str, Any]]:
    """Return all parameter groups, with those of the hybrid optimizer's CPU and GPU parts."""
    if part.is_stub_optimizer:
        return []
    whole = part.optimizer
    subs = (group for sub in getattr(whole, "sub_optimizers", ()) for group in sub.param_groups)
    return [*whole.param_groups, *subs]


def grads_of_norm(part: Any) -> list[Tensor]:
    """Return the gradients over which a part's norm is taken; megatron-core 0.18 renamed them."""
    later = getattr(part, "get_grads_for_grad_norm", None)
    grads: list[Tensor] = (later or part.get_main_grads_for_grad_norm)()
    return grads


def clip_and_step(optimizer: MegatronOptimizer, grad_norm: float) -> None:
    """Clip prepared gradients by a known norm and update; `optimizer.step` computes the norm again.

    Gradients of megatron-core's separate norm groups, which our models lack, are not handled.
    """
    for part in optimizer.chained_optimizers:
        parameters = [] if part.is_stub_optimizer else part.get_parameters()
        if parameters and part.config.clip_grad > 0.0:
            clip_grad_by_total_norm_fp32(
                parameters,
                max_norm=part.config.clip_grad,
                total_norm=grad_norm,
                use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
    applied = optimizer.step_with_ready_grads()
    assert applied, "megatron-core refuses a finite update only with loss scaling"
