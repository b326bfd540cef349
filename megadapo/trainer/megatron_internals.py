"""What of megatron-core is replaced or reached into, in one place; tried on 0.16.1 and 0.19.2.

- `GPTModel.output_processor`: there since 0.18, imitated for 0.16.
- Layer specs: a part is described by a spec or, in later versions, by a partial.
- Optimizer state on disk: two corrections, each harmless where it is not needed.

What megatron-core asks of CUDA by name is answered in `cpu_platform.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor


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
    """The parts of a part of a layer, which is described by a spec or, later, by a partial."""
    return part.keywords["submodules"] if isinstance(part, partial) else part.submodules


@contextmanager
def own_step_counts(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Load into torch's AdamW, whose step count is a tensor per parameter.

    megatron-core 0.16 looks for the count among the stored tensors, where it is not, and gives all
    parameters one count in common, which each of them would then advance.
    """
    parts = [
        part
        for part in optimizer.chained_optimizers
        if isinstance(part.optimizer, torch.optim.AdamW)
    ]
    for part in parts:
        part._set_main_param_and_optimizer_states = partial(_set_states, part)
    yield
    for part in parts:
        del part._set_main_param_and_optimizer_states
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()


def _set_states(part: DistributedOptimizer, param: Tensor, stored: dict[str, Tensor]) -> None:
    group, order = part.model_param_group_index_map[param]
    main_param = part.optimizer.param_groups[group]["params"][order]
    step = part.optimizer.state[main_param]["step"]
    DistributedOptimizer._set_main_param_and_optimizer_states(part, param, stored | {"step": step})


def count_padding(chunk: DistributedDataParallel) -> None:
    """Let checkpoints keep the padding between a buffer's buckets.

    megatron-core drops it when it gathers optimizer state, yet reads each parameter at its place
    in the padded buffer: behind a padded bucket (a tied embedding has its own, over several
    pipeline stages) masters and moments would be saved shifted, without an error.
    """
    for buffer in chunk.buffers + chunk.expert_parallel_buffers:
        buffer.numel_unpadded = buffer.numel
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()
