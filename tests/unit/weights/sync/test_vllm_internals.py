"""Uses of vLLM's internals; catches a quantised engine that keeps old weights after an update.

vLLM quantises while it loads, at its start and in every update. Its 8-bit product needs a GPU and
is left out; its operands are compared with the definition.
"""

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from megadapo.errors import WeightError
from megadapo.rollout.config import RolloutConfig
from megadapo.weights.disk.sources import open_layout
from megadapo.weights.layout.shards import EnginePosition
from megadapo.weights.sync import vllm_internals
from megadapo.weights.sync.vllm_internals import LayerwiseReload
from megadapo.weights.sync.vllm_plugin import NAME, register
from tests.support.rollout.engine_specs import engine_spec

ROWS, COLUMNS, BLOCK = 200, 300, 128
"""Neither is a multiple of a block."""
FP8_MAX = 448.0


class NoKernel:
    """A stand-in for the product."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Do nothing: no repacking."""


class Model(torch.nn.Module):
    """One linear layer and one norm, as vLLM makes them for a quantised engine."""

    def __init__(self, quantization: str) -> None:
        from vllm.config.quantization import _ONLINE_SHORTHANDS
        from vllm.model_executor.layers.linear import ReplicatedLinear
        from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

        super().__init__()
        self.proj = ReplicatedLinear(
            COLUMNS,
            ROWS,
            bias=True,
            params_dtype=torch.bfloat16,
            quant_config=OnlineQuantizationConfig(_ONLINE_SHORTHANDS[quantization]),
            prefix="proj",
            disable_tp=True,
        )
        self.norm = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    """Return a model loaded with zeros, as at a start without weights."""
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.quantization.online import fp8
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_processing,
        record_metadata_for_reloading,
    )

    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
    monkeypatch.setattr(fp8, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **_: NoKernel())
    alone = SimpleNamespace(rank_in_group=0, world_size=1)
    monkeypatch.setattr(parallel_state, "_TP", alone)
    spec = engine_spec(gpus=("0",), config=RolloutConfig(quantization="fp8"))
    arguments = spec.engine_arguments()
    model = Model(arguments["quantization"])
    record_metadata_for_reloading(model)
    # compiling the quantisation takes seconds, and needs a compiler
    with torch.compiler.set_stance("force_eager"):
        for name, size in (("weight", (ROWS, COLUMNS)), ("bias", (ROWS,))):
            parameter = getattr(model.proj, name)
            parameter.weight_loader(parameter, torch.zeros(size, dtype=torch.bfloat16))
        finalize_layerwise_processing(model, config.model_config)
        yield model


def update(model: Model, weights: dict[str, torch.Tensor]) -> None:
    reload = LayerwiseReload(model, torch.device("cpu"), torch.bfloat16)
    for name, weight in weights.items():
        reload.begin(name, tuple(weight.shape)).copy_(weight)
        reload.complete(name, weight)
    reload.finish(SimpleNamespace(dtype=torch.bfloat16))


def random_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"proj.weight": (ROWS, COLUMNS), "proj.bias": (ROWS,), "norm.weight": (1, 1)}
    return {
        name: (torch.randn(shape, generator=generator) * 0.02).bfloat16()
        for name, shape in shapes.items()
    }


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise block by block: the largest element becomes the largest 8-bit number."""
    found = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-ROWS // BLOCK), -(-COLUMNS // BLOCK))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            rows, columns = (slice(n * BLOCK, (n + 1) * BLOCK) for n in (i, j))
            block = weight[rows, columns].float()
            scales[i, j] = block.abs().max().clamp(1e-4) / FP8_MAX
            found[rows, columns] = (block * (1.0 / scales[i, j])).to(found.dtype)
    return found, scales


def test_update_quantises_new_weights(model):
    """Twice: the first reload undoes the start's state. In place: CUDA graphs keep addresses."""
    assert model.proj.weight.dtype == torch.float8_e4m3fn
    addresses = [one.data_ptr() for one in model.parameters()]
    for seed in (1, 2):
        weights = random_weights(seed)
        update(model, weights)
        expected, scales = quantised(weights["proj.weight"])
        assert model.proj.weight.view(torch.uint8).equal(expected.view(torch.uint8))
        assert model.proj.weight_scale_inv.equal(scales)
        assert model.proj.bias.equal(weights["proj.bias"])
        assert model.norm.weight.equal(weights["norm.weight"])
    assert [one.data_ptr() for one in model.parameters()] == addresses


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
