"""Private memory and descendants of processes, and the environment of CPU processes."""

import gc
import importlib.metadata
import mmap
import os
import subprocess
from pathlib import Path

import pytest

from megadapo.cluster.processes import (
    COLLECTOR_THRESHOLD,
    KEEP_FREED_MEMORY,
    MIB,
    ONEDNN_WITHOUT_BF16,
    collecting_rarely,
    cpu_environment,
    descendants,
    fp32_products,
    private_bytes,
    return_freed_memory,
)
from tests.support.processes.running import run_python


def test_private_memory_excludes_shared_memory() -> None:
    """A weight bucket or a mapped library would look like a leak."""
    before = private_bytes(os.getpid())
    own = bytearray(os.urandom(64 * MIB))
    with mmap.mmap(-1, 64 * MIB) as shared:
        shared[:] = bytes(own)
        grown = private_bytes(os.getpid()) - before
    assert 60 * MIB < grown < 80 * MIB


def test_ended_processes_count_as_zero() -> None:
    """An engine is several processes, and one may die while they are measured."""
    with subprocess.Popen(["sleep", "60"]) as child:
        assert private_bytes(os.getpid(), child.pid) > private_bytes(child.pid) > 0
        assert child.pid in descendants(os.getpid())
        child.kill()
    assert private_bytes(child.pid) == 0
    assert descendants(child.pid) == []


def test_heap_fragments_are_returned() -> None:
    """The C library returns only the end of the heap by default."""
    small = [bytes(32 << 10) for _ in range(4096)]
    kept = small[::64]
    before = private_bytes(os.getpid())
    del small
    return_freed_memory()
    assert before - private_bytes(os.getpid()) > 100 * MIB
    assert len(kept) == 64


INTEL = pytest.mark.skipif(
    not list(importlib.metadata.distributions(name="intel-openmp")),
    reason="intel-openmp comes with vLLM's CPU build on x86 only",
)


def test_freed_memory_is_kept_and_threads_are_limited() -> None:
    """Page faults would cost as much as the model does."""
    variables = cpu_environment(3)
    assert variables["OMP_NUM_THREADS"] == variables["MKL_NUM_THREADS"] == "3"
    assert variables.items() >= KEEP_FREED_MEMORY.items()


def test_gnu_openmp_threads_spin_briefly_before_sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Endless spinning takes cores from other ranks; sleeping at once delays every operation."""

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    variables = cpu_environment(2)
    assert variables["OMP_WAIT_POLICY"] == "PASSIVE"
    assert 0 < int(variables["GOMP_SPINCOUNT"]) <= 20_000
    assert "LD_PRELOAD" not in variables


@pytest.mark.parametrize(
    ("processor", "dtype", "preset", "changes"),
    [
        ("AuthenticAMD ... avx512_vnni", "float32", {}, True),
        ("AuthenticAMD ... avx512_vnni", "bfloat16", {}, False),
        ("AuthenticAMD ... avx512_vnni", "float32", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, False),
        ("AuthenticAMD ... avx2", "float32", {}, False),
        ("GenuineIntel ... avx512_vnni", "float32", {}, False),
    ],
)
def test_onednn_multiplies_where_mkl_is_slow(monkeypatch, processor, dtype, preset, changes):
    """In bf16 runs it must keep the processor's bf16 instructions, and a user's choice stays."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    for name, value in preset.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Path, "exists", lambda self: True)
    monkeypatch.setattr(Path, "read_text", lambda self: processor)
    assert fp32_products(dtype) == (ONEDNN_WITHOUT_BF16 if changes else {})


def test_collector_runs_as_before_after_a_start() -> None:
    """A run's cycles may hold large tensors: they must not wait for 50,000 objects."""
    of_the_tests, before = gc.get_threshold(), (701, 10, 10)
    gc.set_threshold(*before)
    try:
        with pytest.raises(ValueError), collecting_rarely():
            assert gc.get_threshold() == COLLECTOR_THRESHOLD
            raise ValueError
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*of_the_tests)


@pytest.mark.parametrize("imported", ["", "import megadapo.rollout.engine.spawned"])  # or forked
def test_collector_of_a_spawned_process_runs_as_before_after_its_imports(imported) -> None:
    program = """
import runpy
runpy.run_module("megadapo.rollout.engine.spawned", run_name="__mp_main__", alter_sys=True)
assert gc.get_threshold()[0] == 50_000
gc.collect(), gc.collect()
assert gc.get_threshold() == before and gc.callbacks == []
"""
    run_python(f"import gc; before = gc.get_threshold(); {imported}{program}")


def test_forked_process_uses_all_cores() -> None:
    """With Intel's OpenMP two engines' forked cores shared the first core of the machine."""
    program = """
import os, torch
torch.ones(9, 9) @ torch.ones(9, 9)
before = os.sched_getaffinity(0)
child = os.fork()
if not child:
    os._exit(os.sched_getaffinity(0) != before)
assert os.waitpid(child, 0)[1] == 0
"""
    run_python(program, **cpu_environment(2))


@INTEL
@pytest.mark.slow
def test_intel_openmp_is_preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing path would only cause a warning; the user's own LD_PRELOAD must stay."""
    monkeypatch.setenv("LD_PRELOAD", "libm.so.6")
    variables = cpu_environment(2)
    assert variables["LD_PRELOAD"].endswith(":libm.so.6")
    assert 0 < int(variables["KMP_BLOCKTIME"]) < 200
    program = "import torch; torch.ones(9, 9) @ torch.ones(9, 9); "
    program += "print(open('/proc/self/maps').read())"
    maps = run_python(program, **variables)
    assert "libiomp5" in maps.stdout
    assert "libm.so" in maps.stdout
    assert "preload" not in maps.stderr
