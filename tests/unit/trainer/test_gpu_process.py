"""The environment of a trainer rank on a GPU, and its requirements."""

import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path
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
        require_cuda(deterministic=False)


def test_broken_transformer_engine_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(InfraError, match="transformer-engine cannot be imported"):
        require_cuda(deterministic=False)


@pytest.mark.parametrize(
    ("capability", "deterministic", "problem"),
    [
        ((8, 0), False, "compute capability 8.0.*install flash-attn"),
        ((9, 0), False, None),
        ((9, 0), True, "no deterministic attention for long.*trainer.deterministic"),
        ((10, 0), True, None),
    ],
)
def test_attention_that_holds_every_pair_of_tokens_is_refused(
    monkeypatch, capability, deterministic, problem
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", ModuleType("pytorch"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    refused = pytest.raises(InfraError, match=problem) if problem else nullcontext()
    with refused:
        require_cuda(deterministic=deterministic)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float32_is_not_multiplied_as_tf32(dtype):
    expected = ("0", "ieee") if dtype == "float32" else (None, None)
    rank = rank_environment(TrainerConfig(), uses_cuda=True, dtype=dtype, num_cores=1)
    engine = engine_spec(gpus=("0",), dtype=dtype).environment()
    for variables in (rank, engine):
        found = variables.get("NVIDIA_TF32_OVERRIDE"), variables.get("TRITON_F32_DEFAULT")
        assert found == expected


def test_triton_reads_the_precision_from_its_variable(monkeypatch):
    """vLLM's attention in Triton names no precision, so its float32 would be TF32 without it."""
    import triton

    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    assert triton.knobs.language.fp32_default == "ieee"
    source = Path(str(importlib.util.find_spec("vllm").origin)).parent
    kernel = (source / "v1/attention/ops/triton_unified_attention.py").read_text()
    assert "tl.dot(" in kernel and "input_precision" not in kernel


def test_sums_over_gpus_have_the_same_bits_twice():
    """Catches a first ratio that is not 1 because the network switch adds in another order."""
    variables = rank_environment(TrainerConfig(), uses_cuda=True, dtype="bfloat16", num_cores=1)
    assert variables["NCCL_NVLS_ENABLE"] == "0"
    assert variables["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
