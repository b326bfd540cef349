"""Environment of processes that compute on the CPU: their threads, and the memory they free."""

from __future__ import annotations

import importlib.metadata
import os

KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
}
"""Environment of the GNU C library's allocator, read when a process starts.

Without it every large activation is a mapping of its own, given back when it is freed: tens of
thousands of page faults a step, each of which clears a page, while other threads wait for the
address space.
"""

FEW_ONEDNN_PRIMITIVES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
"""How many compiled products of matrices oneDNN keeps beside those in use.

It compiles one for every number of rows, which is another one in each step of an engine, at 0.3 MB
each: until its default of 1024 is reached a process grows by 0.3 GB, and by half as much again in
gaps of its heap. 64 are enough for layers of one shape to share them.
"""

SPIN_MILLISECONDS = 2
"""How long a thread without work keeps its core: longer than the gaps between operations, but not
so long that it takes the core from the process whose turn is next."""

_GNU_OPENMP = {
    "OMP_WAIT_POLICY": "PASSIVE",
    # a tenth of a millisecond: operations follow each other faster than threads wake up
    "GOMP_SPINCOUNT": "20000",
}


def cpu_environment(num_threads: int) -> dict[str, str]:
    """Environment variables, fixed before the process loads torch.

    Intel's OpenMP, which vLLM's CPU build requires on x86, takes the place of the GNU one where it
    is installed: with GNU's two threads can be as slow as one (benchmarks/README.md).
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
    }


def _intel_openmp() -> str | None:
    try:
        files = importlib.metadata.files("intel-openmp") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [file.locate() for file in files if file.name == "libiomp5.so"]
    return next((os.path.normpath(path) for path in found if os.path.exists(path)), None)
