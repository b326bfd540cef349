"""The environment of a trainer rank on a GPU, and its requirements."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from megadapo.cluster.machine import PACKAGES, Gpu, Machine, inspect_machine
from megadapo.errors import InfraError
from megadapo.trainer import worker
from megadapo.trainer.config import TrainerConfig
from megadapo.trainer.trainer import rank_environment
from tests.support.rollout.engine_specs import engine_spec

GPU = replace(
    inspect_machine(),
    gpus=(Gpu(name="NVIDIA H100", memory_gib=80.0, compute_capability=(9, 0)),),
    torch_cuda="13.0",
    packages=dict.fromkeys(PACKAGES),
)
WITH_TE = replace(GPU, packages=GPU.packages | {"transformer-engine": "2.20.2"})
A100 = Gpu(name="A100", memory_gib=80.0, compute_capability=(8, 0))
B200 = Gpu(name="B200", memory_gib=180.0, compute_capability=(10, 0))
V100 = Gpu(name="V100", memory_gib=32.0, compute_capability=(7, 0))


@pytest.fixture
def require(monkeypatch):
    """Call require_cuda on a machine whose torch finds a GPU."""

    def call(machine: Machine, *, deterministic: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(worker, "inspect_machine", lambda: machine)
        worker.require_cuda(deterministic=deterministic)

    yield call
    torch.use_deterministic_algorithms(False)


def test_missing_gpu_is_an_error():
    with pytest.raises(InfraError, match=r"finds no GPU .*cluster.device"):
        worker.require_cuda(deterministic=False)


def test_broken_transformer_engine_is_an_error(require, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(InfraError, match="transformer-engine cannot be imported"):
        require(WITH_TE)


@pytest.mark.parametrize(
    ("machine", "deterministic", "problem"),
    [
        (replace(WITH_TE, gpus=(A100,)), False, "compute capability 8.0.*install flash-attn"),
        (WITH_TE, False, None),
        (WITH_TE, True, "no deterministic attention for long.*trainer.deterministic.*uninstall"),
        (replace(WITH_TE, gpus=(B200,)), True, None),
        (replace(GPU, gpus=(A100,)), True, None),
        (replace(GPU, gpus=(V100,)), False, "V100 has compute capability 7.0; bfloat16"),
        (replace(GPU, can_launch_triton=False), False, "C compiler .* apt install gcc python3"),
        (replace(GPU, torch_cuda=None), False, "torch is built for the CPU"),
    ],
)
def test_machine_that_cannot_train_is_refused(
    require, monkeypatch, machine, deterministic, problem
):
    """Catches kernels that fail in the first update, and needs of Transformer Engine without it."""
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", ModuleType("pytorch"))
    with pytest.raises(InfraError, match=problem) if problem else nullcontext():
        require(machine, deterministic=deterministic)
    repeats = torch.are_deterministic_algorithms_enabled()
    assert repeats == (deterministic and problem is None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float32_is_not_multiplied_as_tf32(dtype):
    expected = ("0", "ieee") if dtype == "float32" else (None, None)
    rank = rank_environment(TrainerConfig(), uses_cuda=True, dtype=dtype, num_cores=1)
    engine = engine_spec(gpus=("0",), dtype=dtype).environment()
    for variables in (rank, engine):
        found = variables.get("NVIDIA_TF32_OVERRIDE"), variables.get("TRITON_F32_DEFAULT")
        assert found == expected


def test_triton_reads_the_precision_from_its_variable(monkeypatch):
    import triton

    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    assert triton.knobs.language.fp32_default == "ieee"


def test_sums_over_gpus_have_the_same_bits_twice():
    """Catches a first ratio that is not 1 because the network switch adds in another order."""
    variables = rank_environment(TrainerConfig(), uses_cuda=True, dtype="bfloat16", num_cores=1)
    assert variables["NCCL_NVLS_ENABLE"] == "0"
    assert variables["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize(
    ("split", "expected"),
    [({}, None), ({"data_parallel": 8}, None)]
    + [({name: 2}, "1") for name in ("tensor_parallel", "context_parallel")],
)
def test_one_queue_of_a_gpu_only_where_megatron_core_asks_for_it(split, expected):
    """Catches copies of offloaded state that wait in one queue with every kernel."""
    trainer = TrainerConfig(**split)
    variables = rank_environment(trainer, uses_cuda=True, dtype="bfloat16", num_cores=1)
    assert variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected
