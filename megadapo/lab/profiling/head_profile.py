"""Where the time of the policy head alone goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megadapo.errors import ConfigError
from megadapo.lab.profiling.time_table import (
    format_profile,
    measure_roofline,
    profile_table,
    write_trace,
)

if TYPE_CHECKING:
    import torch


def profile_head(
    shape_text: str, *, device_name: str | None, num_steps: int, trace: Path | None
) -> None:
    """Profile our head's forward and backward pass at one shape, and print where its time went.

    Args:
        shape_text: T,H,V,DTYPE.
        device_name: "cpu" or "cuda"; None takes CUDA where there is.
        trace: chrome trace to write.
    """
    import torch

    from megadapo.lab.bench.head import parse_shape, step_of_ours
    from megadapo.lab.bench.head_inputs import make_inputs
    from megadapo.lab.profiling.bytes_moved import bytes_moved

    device = _device(device_name)
    shape = parse_shape(shape_text, temperature=1.0)
    step = step_of_ours(make_inputs(shape, device))
    step()
    roofline = measure_roofline(device, shape.dtype)
    with bytes_moved() as moved:
        step()
    with torch.profiler.profile(with_flops=True, record_shapes=True) as profile:
        for _ in range(num_steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    num_bytes = {name: count * num_steps for name, count in moved.items()}
    print(f"{num_steps} steps of {shape}")
    print(format_profile(profile_table(profile, roofline, num_bytes), roofline))
    if trace:
        write_trace(profile, trace)


def _device(name: str | None) -> torch.device:
    import torch

    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device=cuda: torch sees no CUDA device")
    return device
