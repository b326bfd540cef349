"""`megadapo profile`: how kernels compile, or where the time of a step or of the head goes."""

from __future__ import annotations

import argparse
from pathlib import Path

from megadapo.commands.common import Commands, add_command
from megadapo.errors import ConfigError


def add(commands: Commands) -> None:
    summary = "how every kernel compiles, or where the time of a training step or the head goes"
    parser = add_command(commands, "profile", summary, takes_overrides=True)
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
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.steps < 1 or arguments.sequences < 0:
        raise ConfigError("--steps must be at least 1, and --sequences not negative")
    if arguments.overrides and arguments.step is None:
        raise ConfigError(f"{arguments.overrides[0]}: only --step has a configuration")
    if arguments.step is not None:
        _profile_step(arguments)
    elif arguments.head is not None:
        from megadapo.profiling.head_profile import profile_head

        profile_head(
            arguments.head,
            device_name=arguments.device,
            num_steps=arguments.steps,
            trace=arguments.trace,
        )
    else:
        from megadapo.profiling.compile_report import (
            ARCHITECTURES,
            compile_report,
            format_compile_report,
        )

        print(format_compile_report(compile_report(arguments.arch or ARCHITECTURES)))
    return 0


def _profile_step(arguments: argparse.Namespace) -> None:
    """Profile updates of a recipe's own trainer on random tokens."""
    from rich.console import Console

    from megadapo.config import load_config
    from megadapo.profiling.step_profile import profile_training_step
    from megadapo.profiling.time_table import format_profile

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
