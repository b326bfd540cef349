"""`megadapo train`: train a model, or resume a run."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from megadapo.commands.common import Commands, add_command, add_config, load_checked
from megadapo.commands.lab.plan import add_gpu, check_memory
from megadapo.observe.tables import printable


def add(commands: Commands) -> None:
    parser = add_command(commands, "train", "train a model, or resume a run", takes_overrides=True)
    add_config(parser)
    parser.add_argument(
        "--replay",
        type=Path,
        metavar="RUN/rollouts",
        help="train on the saved rollouts of another run, step by step, without engines; set "
        'observe.saved_groups = "all" in that run to save whole batches',
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the configuration, its files and the GPUs' memory; print it and exit",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="restart at most N times after failed processes or preemption, but never after an "
        "error in the configuration, the data or an oracle; default: 0",
    )
    parser.add_argument(
        "--give-up-after",
        type=_seconds,
        default="24h",
        metavar="TIME",
        help="with --restarts: repeat starts that make no progress, as without nodes, for this "
        "time, such as 90m, 24h or 3d; they do not count as restarts; default: 24h",
    )
    parser.add_argument(
        "--accept-changes",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="KEY[,KEY]",
        help="resume although these keys, which decide what is learned, have changed since the "
        "checkpoint, as in --accept-changes=reward.rule",
    )
    parser.add_argument(
        "--allow-fewer",
        action="store_true",
        help="if nodes of the cluster are missing after cluster.start_timeout_s, start with fewer "
        "data-parallel ranks and engines",
    )
    add_gpu(parser, purpose="GPU for whose memory --dry-run plans a run on CUDA")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config, warnings = load_checked(arguments)
    if arguments.dry_run:
        from megadapo.cluster.this_node import has_gpu
        from megadapo.config import to_toml

        if arguments.replay is not None:
            from megadapo.run.replay import check_replay

            warnings.append(check_replay(config, arguments.replay))
        if config.cluster.device == "cuda" or (has_gpu() and config.cluster.uses_cuda):
            warnings += check_memory(config, arguments.gpu)
        print(to_toml(config), end="")
        for warning in warnings:
            print(f"megadapo: {printable(warning)}", file=sys.stderr)
        return 0
    if arguments.restarts > 0:
        from megadapo.run.state.supervisor import Supervisor

        return Supervisor(
            [sys.executable, "-m", "megadapo.cli", "train", *_single_start(arguments)],
            config.run.folder,
            max_restarts=arguments.restarts,
            give_up_after_s=arguments.give_up_after,
            on_event=config.run.on_event,
            say=lambda line: print(f"megadapo: {printable(line)}", file=sys.stderr, flush=True),
        ).run()
    from megadapo.train import train

    train(
        config,
        replay=arguments.replay,
        accept_changes=arguments.accept_changes,
        allow_fewer=arguments.allow_fewer,
    )
    return 0


def _seconds(text: str) -> float:
    """Return the seconds of a time such as 90, 90m, 24h or 3d."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 90m, 24h or 3d")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def _single_start(arguments: argparse.Namespace) -> list[str]:
    """Return the arguments of one driver, without those of the supervisor."""
    words = [arguments.config]
    if arguments.resume is not None:
        words += ["--resume", arguments.resume]
    if arguments.replay is not None:
        words += ["--replay", str(arguments.replay)]
    if arguments.accept_changes:
        words.append(f"--accept-changes={','.join(arguments.accept_changes)}")
    if arguments.allow_fewer:
        words.append("--allow-fewer")
    return [*words, *arguments.overrides]
