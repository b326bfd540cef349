"""vLLM without the functions that are reached into: a message, not a traceback of an import."""

from __future__ import annotations

import sys

import pytest
import torch

from megadapo.errors import WeightError
from megadapo.weights.sync import vllm_internals
from megadapo.weights.sync.vllm_plugin import NAME, register


def test_a_vllm_without_layerwise_reload_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ImportError inside vLLM's worker would end the engine with vLLM's own message."""
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.reload", None)
    with pytest.raises(WeightError, match=r"cannot replace weights .* vLLM 0\.32 can"):
        vllm_internals.layerwise_reload()


def test_a_wrapped_loader_is_unwrapped_down_to_the_models_own() -> None:
    """One wrapper too many would put off every later load; one too few loses the model's loader."""
    from functools import wraps

    def own(param: torch.Tensor, loaded: torch.Tensor) -> None:
        param.copy_(loaded)

    @wraps(own)
    def models_own(param: torch.Tensor, loaded: torch.Tensor) -> None:
        own(param, loaded)

    @wraps(models_own, assigned=("__doc__",))
    def online_process_loader(*args: object) -> None:
        raise AssertionError("put off")

    param = torch.zeros(2)
    param.weight_loader = online_process_loader
    assert vllm_internals._original_loader(param) is models_own


def test_registering_twice_is_no_error() -> None:
    """vLLM loads its plugins in each process, and some processes more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    register()
    register()
    with pytest.raises(ValueError, match="already registered"):
        WeightTransferEngineFactory.register_engine(NAME, object)
