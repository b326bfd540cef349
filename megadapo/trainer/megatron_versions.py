"""What differs between the megatron-core versions that the trainer runs on, 0.16 and >= 0.18."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor


class _GPTModelWithHook(GPTModel):
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


def mlp_submodules(mlp: ModuleSpec | partial[Any]) -> MLPSubmodules:
    """The parts of a layer's MLP, which is described by a spec or, later, by a partial."""
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
