"""Time and peak memory of a call, on CUDA and on the CPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import torch

from megadapo.cluster.processes import MIB, return_freed_memory

Clock = Literal["wall", "cpu"]


def time_together(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    warmup: int,
    repeats: int,
    clock: Clock = "wall",
) -> dict[str, list[float]]:
    """Return the milliseconds of all calls, which take turns in every round.

    So a slow minute affects all of them.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(warmup + repeats):
        for name, call in calls.items():
            elapsed = time_once(call, device, clock)
            if round_number >= warmup:
                samples[name].append(elapsed)
    return samples


def time_once(call: Callable[[], object], device: torch.device, clock: Clock = "wall") -> float:
    """Return the milliseconds of one call, by CUDA's own clock on a GPU.

    The "cpu" clock counts the CPU time of all threads of this process: with one thread it does not
    depend on the machine's other load.
    """
    if device.type == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize(device)
        elapsed_ms: float = start.elapsed_time(stop)
        return elapsed_ms
    now = time.process_time if clock == "cpu" else time.perf_counter
    begin = now()
    call()
    return 1e3 * (now() - begin)


def peak_extra_mib(call: Callable[[], object], device: torch.device) -> float | None:
    """Return the peak memory of a call in MiB, results included, above the memory before it.

    On the CPU this is the kernel's high-water mark of the process; None if it cannot be reset.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / MIB
    # otherwise the call could reuse freed memory that is still resident
    return_freed_memory()
    try:
        before = reset_resident_peak()
    except OSError:
        return None
    call()
    return (resident_peak() - before) / MIB


def reset_resident_peak() -> int:
    """Reset this process's peak of resident memory; return the present resident bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def resident_peak() -> int:
    """Return the peak of this process's resident memory in bytes since the reset."""
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name + ":"))
