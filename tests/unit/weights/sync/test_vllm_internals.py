"""The uses of vLLM beyond its documented interfaces."""

import sys

import pytest
import torch

from megadapo.errors import WeightError
from megadapo.weights.sync import vllm_internals
from megadapo.weights.sync.vllm_plugin import NAME, register


def test_missing_layerwise_reload_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.reload", None)
    with pytest.raises(WeightError, match=r"cannot replace weights .* vLLM 0\.32 can"):
        vllm_internals.layerwise_reload()


def test_loader_is_unwrapped_to_model_loader():
    """Catches a wrapper that is left, which delays loads, and the loss of the model's loader."""
    from functools import wraps

    def own(param: torch.Tensor, loaded: torch.Tensor) -> None:
        param.copy_(loaded)

    @wraps(own)
    def models_own(param: torch.Tensor, loaded: torch.Tensor) -> None:
        own(param, loaded)

    @wraps(models_own, assigned=("__doc__",))
    def online_process_loader(*args: object) -> None:
        raise AssertionError("delayed")

    param = torch.zeros(2)
    param.weight_loader = online_process_loader
    assert vllm_internals._original_loader(param) is models_own


def test_plugin_can_be_registered_twice():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    register()
    register()
    with pytest.raises(ValueError, match="already registered"):
        WeightTransferEngineFactory.register_engine(NAME, object)
