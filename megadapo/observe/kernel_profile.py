"""`megadapo profile`: how every Triton kernel compiles, or where the policy head's time goes."""

from __future__ import annotations

import argparse
from pathlib import Path

from megadapo.errors import ConfigError
from megadapo.observe.kernel_report import (
    ARCHITECTURES,
    compile_report,
    format_compile_report,
    format_profile,
    measure_roofline,
    profile_table,
    write_trace,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megadapo profile` and of tools/profile_kernels.py."""
    parser.add_argument("--head", metavar="T,H,V,DTYPE", help="profile the policy head instead")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is")
    parser.add_argument("--steps", type=int, default=3, help="profiled steps (default 3)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="also write a chrome trace")
    parser.add_argument(
        "--arch",
        type=int,
        action="append",
        help="architecture of the compile report, such as 90 (default: all)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Print the table asked for."""
    if arguments.head is None:
        print(format_compile_report(compile_report(arguments.arch or ARCHITECTURES)))
        return 0
    profile_head(arguments)
    return 0


def profile_head(arguments: argparse.Namespace) -> None:
    """Profile our head's forward and backward pass at one shape."""
    import torch

    from megadapo.bench.head import parse_shape, step_of_ours
    from megadapo.bench.head_inputs import make_inputs

    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device=cuda: torch sees no CUDA device")
    shape = parse_shape(arguments.head, temperature=1.0)
    step = step_of_ours(make_inputs(shape, device))
    step()
    roofline = measure_roofline(device, shape.dtype)
    with torch.profiler.profile(with_flops=True, record_shapes=True) as profile:
        for _ in range(arguments.steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    print(f"{arguments.steps} steps of {shape}")
    print(format_profile(profile_table(profile, roofline), roofline))
    if arguments.trace:
        write_trace(profile, arguments.trace)
