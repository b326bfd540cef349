"""All uses of vLLM beyond its documented interfaces; tried on vLLM 0.32.

- `model_loader.reload`: the layerwise reload, which replaces weights that vLLM repacks after
  loading. If this vLLM does not have it, an engine that needs it fails with an error that names it.
  Parameters that vLLM does not repack (dense models on CUDA) do not need it.
- `FusedMoE.quant_method.moe_kernel`: the CPU's packed experts. Without it, vLLM packs them again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import vllm
from vllm.config import ModelConfig
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from megadapo.errors import WeightError
from megadapo.weights.sync.receiver import Target

TRIED = "0.32"


def layerwise_reload() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Return vLLM's functions (begin, end, wrap a parameter's loader) of a layerwise reload.

    Raise WeightError if this vLLM does not have them.
    """
    try:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )
        from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader
    except ImportError as error:
        raise WeightError(
            f"vLLM {vllm.__version__} cannot replace weights that it has repacked ({error}); "
            f"vLLM {TRIED} can: use that, or an unquantised dense model on CUDA"
        ) from error
    return initialize_layerwise_reload, finalize_layerwise_reload, make_online_process_loader


@dataclass
class LayerwiseReload(Target):
    """A target that loads whole shards with vLLM, which repacks a layer once it is complete."""

    model: torch.nn.Module
    device: torch.device
    dtype: torch.dtype
    layers: dict[str, tuple[torch.nn.Module, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tied = _tied_layers(self.model)
        self._replaced: list[tuple[Any, Callable[..., object]]] = []
        if self.device.type == "cpu":
            # vLLM packs experts for the CPU again only if there is no kernel
            for layer in self.model.modules():
                method = getattr(layer, "quant_method", None)
                if method is not None and getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None
        begin, self._end, self._wrap_loader = layerwise_reload()
        begin(self.model)
        for prefix, layer in self.model.named_modules():
            for name, _ in layer.named_parameters(recurse=False):
                self.layers[f"{prefix}.{name}"] = (layer, name)

    def begin(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def complete(self, name: str, tensor: torch.Tensor) -> None:
        layer, attribute = self.layers[name]
        param = getattr(layer, attribute)
        # vLLM replays the loader when the layer is complete; ours copies the shard unchanged. vLLM
        # reuses the parameter in later reloads, so `finish` restores its own loader.
        self._replaced.append((param, _original_loader(param)))
        param.weight_loader = _load_shard
        param.weight_loader = self._wrap_loader(layer, attribute)
        param.weight_loader(param, tensor)

    def finish(self, model_config: ModelConfig) -> None:
        """Let vLLM process the remaining layers, and all layers with a tied parameter."""
        self._end(self.model, model_config)
        for param, loader in self._replaced:
            param.weight_loader = loader
        # the reload processes only the first layer of a tied parameter; on the CPU the head would
        # still compute with its packed copy of the old weights
        for layer in self._tied:
            cast(QuantizeMethodBase, layer.quant_method).process_weights_after_loading(layer)


def _tied_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return layers that share a parameter with an earlier layer."""
    seen: set[int] = set()
    tied = []
    for layer in model.modules():
        own = {id(param) for param in layer.parameters(recurse=False)}
        if own & seen:
            tied.append(layer)
        seen |= own
    return tied


def _load_shard(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    if param.shape != loaded_weight.shape:
        raise WeightError(
            f"The engine's parameter has shape {list(param.shape)}, its layout says "
            f"{list(loaded_weight.shape)}."
        )
    param.data.copy_(loaded_weight)


def _original_loader(param: torch.Tensor) -> Callable[..., object]:
    """Return the parameter's weight loader without the wrappers of a layerwise reload."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    loader: Callable[..., object] = getattr(param, "weight_loader", default_weight_loader)
    own: Callable[..., object] = inspect.unwrap(
        loader, stop=lambda one: one.__name__ != "online_process_loader"
    )
    return own
