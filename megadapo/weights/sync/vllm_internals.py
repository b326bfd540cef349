"""What of vLLM is reached beyond its documented interfaces, in one place; tried on vLLM 0.32.

- `model_loader.reload`: its layerwise reload, by which weights that vLLM repacks after loading are
  replaced. A vLLM without it is refused by name when an engine needs it; parameters that vLLM
  computes with as they are (dense models on CUDA) are written without it.
- `FusedMoE.quant_method.moe_kernel`: the CPU's packed experts. Where there are none, nothing
  is done.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from megadapo.errors import WeightError
from megadapo.weights.sync.receiver import Target

TRIED = "0.32"


def layerwise_reload() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """vLLM's functions (begin, end, wrap a parameter's loader) of a layerwise reload.

    Raises:
        WeightError: this vLLM does not have them.
    """
    try:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )
        from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader
    except ImportError as error:
        raise WeightError(
            f"vLLM {version_of_vllm()} cannot replace weights that it has repacked ({error}); "
            f"vLLM {TRIED} can: use that, or an unquantised dense model on CUDA"
        ) from error
    return initialize_layerwise_reload, finalize_layerwise_reload, make_online_process_loader


def version_of_vllm() -> str:
    """The installed version, whatever its build is called."""
    import vllm

    return str(vllm.__version__)


class _Loadable(Protocol):
    """A parameter, with the function that vLLM hangs on it to load it by."""

    weight_loader: Callable[..., object]


@dataclass
class LayerwiseReload(Target):
    """Whole shards go through vLLM's loading, which repacks a layer once it is complete."""

    model: torch.nn.Module
    device: torch.device
    dtype: torch.dtype
    layers: dict[str, tuple[torch.nn.Module, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tied = _tied_layers(self.model)
        self._replaced: list[tuple[_Loadable, Callable[..., object]]] = []
        if self.device.type == "cpu":
            _forget_expert_kernels(self.model)
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
        # vLLM replays the loader when the layer is complete; ours takes the shard as it is. It
        # reuses the parameter in later reloads, so its own loader must come back.
        self._replaced.append((param, _original_loader(param)))
        param.weight_loader = _load_shard
        param.weight_loader = self._wrap_loader(layer, attribute)
        param.weight_loader(param, tensor)

    def finish(self, model_config: ModelConfig) -> None:
        """Let vLLM process what it put off, and what shares a parameter with a loaded layer.

        The reload processes the first layer of a tied parameter only; on the CPU the head would
        go on computing with the packed copy it made of the old weights.
        """
        self._end(self.model, model_config)
        for param, loader in self._replaced:
            param.weight_loader = loader
        for layer in self._tied:
            cast(QuantizeMethodBase, layer.quant_method).process_weights_after_loading(layer)


def _tied_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Layers whose parameter belongs to an earlier layer too."""
    seen: set[int] = set()
    tied = []
    for layer in model.modules():
        own = {id(param) for param in layer.parameters(recurse=False)}
        if own & seen:
            tied.append(layer)
        seen |= own
    return tied


def _forget_expert_kernels(model: torch.nn.Module) -> None:
    """Have experts packed anew: vLLM packs them for the CPU only while there is no kernel yet,
    and would otherwise compute with the unpacked weights of the update."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _load_shard(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    if param.shape != loaded_weight.shape:
        raise WeightError(
            f"The engine's parameter has shape {list(param.shape)}, its layout says "
            f"{list(loaded_weight.shape)}."
        )
    param.data.copy_(loaded_weight)


def _original_loader(param: torch.Tensor) -> Callable[..., object]:
    """The parameter's weight loader without the wrappers of a layerwise reload."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    loader: Callable[..., object] = getattr(param, "weight_loader", default_weight_loader)
    own: Callable[..., object] = inspect.unwrap(
        loader, stop=lambda one: one.__name__ != "online_process_loader"
    )
    return own
