"""Time and peak memory of a call, on CUDA and on the CPU."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megadapo.cluster.processes import MIB, return_freed_memory

Clock = Literal["wall", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds over all repeats of one call."""

    best_ms: float
    median_ms: float
    repeats: int


def time_together(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    warmup: int,
    repeats: int,
    clock: Clock = "wall",
) -> dict[str, Timing]:
    """Time all calls in turn, round after round, so that a slow minute hits each of them."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(warmup + repeats):
        for name, call in calls.items():
            elapsed = time_once(call, device, clock)
            if round_number >= warmup:
                samples[name].append(elapsed)
    return {
        name: Timing(best_ms=min(ms), median_ms=statistics.median(ms), repeats=repeats)
        for name, ms in samples.items()
    }


def time_once(call: Callable[[], object], device: torch.device, clock: Clock = "wall") -> float:
    """Milliseconds of one call, by the device's own clock where it has one.

    The "cpu" clock counts what this process computed, over all its threads: with one thread it
    says the same on a busy machine as on a quiet one.
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
    """Most memory in use during a call beyond what was before it, results included, in MiB.

    On the CPU the kernel's high-water mark of this process; None where it cannot be reset.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / MIB
    # or the call could hide in another's leavings
    return_freed_memory()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    before = _status_kib("VmRSS")
    call()
    return (_status_kib("VmHWM") - before) / 1024


def _status_kib(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise OSError(f"/proc/self/status has no {name}")
