"""Time of a call, and peak memory of this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

Clock = Literal["wall", "cpu"]


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
