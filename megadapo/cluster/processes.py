"""Processes on this machine: their environment variables, descendants and memory."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import gc
import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

MIB = 1 << 20

KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
}
"""Settings of the GNU C library's allocator, read when a process starts.

By default every large activation is a mapping of its own and is unmapped when it is freed. That
costs tens of thousands of page faults a step, while other threads wait for the address space.
"""

FEW_ONEDNN_PRIMITIVES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
"""Number of compiled matrix products that oneDNN caches.

It compiles one for every number of rows, 0.3 MB each, and an engine sees a new number in each step.
With the default of 1024 a process grows by 0.3 GB, and by half as much again in heap fragmentation.
64 are enough for layers of one shape to share them.
"""

ONEDNN_WITHOUT_BF16 = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}
"""Environment of a process in which `use_onednn_products` may turn MKL's products off."""

COLLECTOR_THRESHOLD = (50_000, 20, 50)
"""Numbers of new objects between two runs of Python's collector; the first is 700 by default."""

SPIN_MILLISECONDS = 2
"""Time that an idle thread spins before it sleeps: longer than the gaps between operations, short
enough to leave the core to the next process."""

_GNU_OPENMP = {
    "OMP_WAIT_POLICY": "PASSIVE",
    # a tenth of a millisecond: operations follow each other faster than threads wake up
    "GOMP_SPINCOUNT": "20000",
}


def cpu_environment(num_threads: int) -> dict[str, str]:
    """Return the variables of a process that computes on the CPU; set them before it loads torch.

    Intel's OpenMP, which vLLM's CPU build requires on x86, is preloaded where it is installed: with
    GNU's, two threads can be as slow as one (benchmarks/README.md).
    """
    variables = {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        **KEEP_FREED_MEMORY,
        **FEW_ONEDNN_PRIMITIVES,
    }
    library = _intel_openmp()
    if library is None:
        return variables | _GNU_OPENMP
    preloaded = [library, *filter(None, [os.environ.get("LD_PRELOAD")])]
    return variables | {
        "LD_PRELOAD": ":".join(preloaded),
        "KMP_BLOCKTIME": str(SPIN_MILLISECONDS),
        # otherwise a forked process may use one core only, the first
        "KMP_AFFINITY": "none",
    }


def fp32_products(dtype: str) -> dict[str, str]:
    """Return the variables of a process that multiplies matrices of torch in "float32" on a CPU.

    MKL runs its AVX2 code on AMD's processors with AVX-512, so oneDNN is to multiply there: at 2.2
    times the rate on Zen 5; others are not measured.
    """
    if dtype != "float32" or "ONEDNN_MAX_CPU_ISA" in os.environ:
        return {}
    processor = Path("/proc/cpuinfo")
    text = processor.read_text() if processor.exists() else ""
    is_slow = "AuthenticAMD" in text and "avx512_vnni" in text
    return ONEDNN_WITHOUT_BF16 if is_slow else {}


@contextlib.contextmanager
def collecting_rarely() -> Iterator[None]:
    """Run Python's collector rarely inside, which is a third of the time of large imports."""
    before = gc.get_threshold()
    gc.set_threshold(*COLLECTOR_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def full_precision(dtype: str) -> dict[str, str]:
    """Return the variables that make "float32" mean float32 on a GPU.

    Otherwise Transformer Engine and cuBLAS, and vLLM's attention in Triton, multiply such matrices
    with ten bits of mantissa (TF32), and trainer and engine each in a different way.
    """
    if dtype != "float32":
        return {}
    return {"NVIDIA_TF32_OVERRIDE": "0", "TRITON_F32_DEFAULT": "ieee"}


def _intel_openmp() -> str | None:
    try:
        files = importlib.metadata.files("intel-openmp") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [file.locate() for file in files if file.name == "libiomp5.so"]
    return next((os.path.normpath(path) for path in found if os.path.exists(path)), None)


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children and so on; empty if it has ended."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def private_bytes(*pids: int) -> int:
    """Return the private (unshared) memory of processes in total; used to detect leaks.

    Mapped files and shared memory are not counted; a process that has ended counts as 0.
    """
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            memory = psutil.Process(pid).memory_info()
            total += memory.rss - memory.shared
    return total


def return_freed_memory() -> None:
    """Let the C library return the free pages of the heap to the system."""
    libc = ctypes.CDLL(ctypes.util.find_library("c"))
    # only the GNU C library has this function
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
