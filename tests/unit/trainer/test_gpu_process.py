"""The environment of a trainer rank on a GPU, and its requirements."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from megadapo.errors import InfraError
from megadapo.trainer.config import TrainerConfig
from megadapo.trainer.trainer import rank_environment
from megadapo.trainer.worker import require_cuda
from tests.support.rollout.engine_specs import engine_spec


def test_missing_gpu_is_an_error():
    with pytest.raises(InfraError, match=r"finds no GPU .*cluster.device"):
        require_cuda()


def test_broken_transformer_engine_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(InfraError, match="transformer-engine cannot be imported"):
        require_cuda()


def test_old_gpu_needs_flash_attn(monkeypatch):
    """Catches an A100 whose attention holds the square of a micro-batch's tokens in memory."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", ModuleType("pytorch"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    require_cuda()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(InfraError, match="compute capability 8.0.*install flash-attn"):
        require_cuda()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float32_is_not_multiplied_as_tf32(dtype):
    expected = "0" if dtype == "float32" else None
    rank = rank_environment(TrainerConfig(), uses_cuda=True, dtype=dtype, num_cores=1)
    engine = engine_spec(gpus=("0",), dtype=dtype).environment()
    for variables in (rank, engine):
        assert variables.get("NVIDIA_TF32_OVERRIDE") == expected


def test_sums_over_gpus_have_the_same_bits_twice():
    """Catches a first ratio that is not 1 because the network switch adds in another order."""
    variables = rank_environment(TrainerConfig(), uses_cuda=True, dtype="bfloat16", num_cores=1)
    assert variables["NCCL_NVLS_ENABLE"] == "0"
    assert variables["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
