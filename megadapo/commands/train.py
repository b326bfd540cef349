"""`megadapo train`: train a model, or resume a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from megadapo.commands.common import (
    Commands,
    add_command,
    add_config,
    add_start_options,
    load_checked,
    start_run,
)
from megadapo.commands.plan import add_gpu, check_memory


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
        "--schedule",
        type=Path,
        metavar="RUN",
        help='repeat a run with sampling.mode = "partial" or "async" bit for bit, with any number '
        "of engines, and stop at the first difference",
    )
    add_start_options(parser)
    add_gpu(parser, purpose="GPU for whose memory --dry-run plans a run on CUDA")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config, warnings = load_checked(arguments)
    if arguments.dry_run:
        from megadapo.cluster.this_node import has_gpu
        from megadapo.config.preflight import first_prompt, kl_divergences
        from megadapo.plan.forecast import core_warnings

        warnings += core_warnings(config)
        if arguments.replay is not None:
            from megadapo.run.replay import check_replay

            warnings.append(check_replay(config, arguments.replay))
        if arguments.schedule is not None:
            from megadapo.run.replay import check_schedule

            warnings.append(check_schedule(config, arguments.schedule))
        if config.cluster.device == "cuda" or (has_gpu() and config.cluster.uses_cuda):
            warnings += check_memory(config, arguments.gpu)
        warnings += [*kl_divergences(config.algorithm, config.model.path), *first_prompt(config)]

    def start() -> None:
        from megadapo.loop import train

        train(
            config,
            replay=arguments.replay,
            schedule=arguments.schedule,
            accept_changes=arguments.accept_changes,
            allow_fewer=arguments.allow_fewer,
        )

    sources = {"--replay": arguments.replay, "--schedule": arguments.schedule}
    words = [word for name, path in sources.items() if path for word in (name, str(path))]
    return start_run(arguments, "train", config, warnings, start, words)
