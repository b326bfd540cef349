"""The uses of vLLM beyond its documented interfaces."""

import sys

import pytest
import torch

from megadapo.errors import WeightError
from megadapo.weights.disk.sources import open_layout
from megadapo.weights.layout.shards import EnginePosition
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


def test_engine_stages_match_vllm(model_folders):
    from vllm.distributed.utils import get_pp_indices

    layout = open_layout(model_folders["Qwen2"])
    for pp_size in (1, 2, 3, 4, 5):
        for pp_rank in range(pp_size):
            layers = layout.engine_layers(EnginePosition(pp_rank=pp_rank, pp_size=pp_size))
            assert (layers.start, layers.stop) == get_pp_indices(5, pp_rank, pp_size)


def test_plugin_can_be_registered_twice():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    register()
    register()
    with pytest.raises(ValueError, match="already registered"):
        WeightTransferEngineFactory.register_engine(NAME, object)
