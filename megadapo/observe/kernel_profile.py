"""`megadapo profile`: how kernels compile, or where the time of a step or of the head goes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megadapo.errors import ConfigError
from megadapo.observe.compile_report import (
    ARCHITECTURES,
    compile_report,
    format_compile_report,
)
from megadapo.observe.time_table import (
    format_profile,
    measure_roofline,
    profile_table,
    write_trace,
)

if TYPE_CHECKING:
    import torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megadapo profile` and of tools/profile_kernels.py."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--step", metavar="CONFIG", help="profile a recipe's training step")
    what.add_argument("--head", metavar="T,H,V,DTYPE", help="profile the policy head alone")
    parser.add_argument(
        "--sequences", type=int, default=0, help="of --step: sequences (default: the mini-batch)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="of --head: default cuda")
    parser.add_argument("--steps", type=int, default=3, help="profiled steps (default 3)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="also write a chrome trace")
    parser.add_argument(
        "--arch",
        type=int,
        action="append",
        help="architecture of the compile report, such as 90 (default: all)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Print the table asked for; `arguments.overrides` belong to the recipe of --step."""
    if arguments.steps < 1 or arguments.sequences < 0:
        raise ConfigError("--steps must be at least 1, and --sequences not negative")
    if arguments.step is not None:
        profile_step(arguments)
    elif arguments.overrides:
        raise ConfigError(f"{arguments.overrides[0]}: only --step has a configuration")
    elif arguments.head is not None:
        profile_head(arguments)
    else:
        print(format_compile_report(compile_report(arguments.arch or ARCHITECTURES)))
    return 0


def profile_step(arguments: argparse.Namespace) -> None:
    """Profile updates of a recipe's own trainer on random tokens."""
    from rich.console import Console

    from megadapo.config import load_config
    from megadapo.observe.step_profile import profile_training_step

    config = load_config(arguments.step, arguments.overrides)
    with Console(stderr=True).status("start the trainer and profile it"):
        result = profile_training_step(
            config,
            num_sequences=arguments.sequences,
            num_steps=arguments.steps,
            trace=arguments.trace,
        )
    rate = result.num_tokens / result.seconds_per_update
    print(
        f"one update of {result.num_tokens} tokens on {config.trainer.num_ranks} ranks: "
        f"{result.seconds_per_update:.3f} s, {rate:.0f} tokens/s; below, {arguments.steps} of them "
        f"on rank {result.rank}"
    )
    print("ms per update: " + ", ".join(f"{name} {ms:.1f}" for name, ms in result.phases.items()))
    print(format_profile(result.rows, result.roofline))


def profile_head(arguments: argparse.Namespace) -> None:
    """Profile our head's forward and backward pass at one shape."""
    import torch

    from megadapo.bench.head import parse_shape, step_of_ours
    from megadapo.bench.head_inputs import make_inputs
    from megadapo.observe.bytes_moved import bytes_moved

    device = _device(arguments.device)
    shape = parse_shape(arguments.head, temperature=1.0)
    step = step_of_ours(make_inputs(shape, device))
    step()
    roofline = measure_roofline(device, shape.dtype)
    with bytes_moved() as moved:
        step()
    with torch.profiler.profile(with_flops=True, record_shapes=True) as profile:
        for _ in range(arguments.steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    num_bytes = {name: count * arguments.steps for name, count in moved.items()}
    print(f"{arguments.steps} steps of {shape}")
    print(format_profile(profile_table(profile, roofline, num_bytes), roofline))
    if arguments.trace:
        write_trace(profile, arguments.trace)


def _device(name: str | None) -> torch.device:
    import torch

    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device=cuda: torch sees no CUDA device")
    return device
