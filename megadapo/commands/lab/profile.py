"""`megadapo profile`: time of a recipe's training step by kernel."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megadapo.commands.common import Commands, add_command
from megadapo.errors import ConfigError

if TYPE_CHECKING:
    from megadapo.config import RunConfig
    from megadapo.trainer.trainer import Trainer


def add(commands: Commands) -> None:
    summary = "time of a training step by kernel"
    parser = add_command(commands, "profile", summary, takes_overrides=True)
    parser.add_argument("config", help="recipe (TOML)")
    parser.add_argument(
        "--sequences", type=int, default=0, help="of an update (default: a mini-batch)"
    )
    parser.add_argument("--steps", type=int, default=3, help="profiled steps (default 3)")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="also write a trace for Perfetto (.json or .json.gz): a whole step of all trainer "
        "ranks and engines",
    )
    parser.add_argument(
        "--memory",
        type=Path,
        metavar="FOLDER",
        help="on GPUs: also write a memory snapshot of each rank during an update",
    )
    parser.add_argument(
        "--nvtx",
        action="store_true",
        help="on GPUs, under nsys profile --capture-range=cudaProfilerApi: NVTX ranges "
        "in place of the table",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.steps < 1 or arguments.sequences < 0:
        raise ConfigError("--steps must be at least 1, and --sequences not negative")
    from megadapo.config import load_config
    from megadapo.lab.profiling.profiles import Updates, profile_training_step, trainer_alone

    trace: Path | None = arguments.trace
    overrides = arguments.overrides
    if trace is not None:
        # all nodes that share the trace's folder share this one
        folder = trace.absolute().with_name(f"{trace.name}.parts")
        own = (f"run.folder={folder}", 'run.resume="never"')
        overrides = [*own, "evaluation.every=0", "checkpoint.every=1000000", *overrides]
    config = load_config(arguments.config, overrides)
    if (arguments.memory or arguments.nvtx) and not config.cluster.uses_cuda:
        option = "--memory" if arguments.memory else "--nvtx"
        raise ConfigError(f"{option} needs GPUs, and this recipe runs on the CPU (cluster.device)")
    updates = Updates(
        config=config,
        num_sequences=arguments.sequences or config.algorithm.responses_per_mini_batch,
        num_steps=arguments.steps,
        memory=arguments.memory and arguments.memory.absolute(),
        nvtx=arguments.nvtx,
    )
    running = trainer_alone(config) if trace is None else _after_traced_step(config, trace)
    with running as trainer:
        print(profile_training_step(trainer, updates))
    return 0


@contextmanager
def _after_traced_step(config: RunConfig, trace: Path) -> Iterator[Trainer]:
    """Trace the second step of a run, then yield its trainer; the engines no longer have GPUs."""
    import shutil
    from contextlib import closing

    from megadapo.lab.profiling.trace import traced
    from megadapo.loop import training_steps
    from megadapo.run.launch import start_workers
    from megadapo.run.rollouts import LiveRollouts
    from megadapo.run.run import Run

    if config.run.num_steps < 3:
        raise ConfigError("run.num_steps must be at least 3: the second is traced, the last saves")
    folder = config.run.folder
    if folder.exists():
        raise ConfigError(f"{folder} (the trace's parts) exists: remove it")
    with (
        Run.open(config) as run,
        start_workers(config, run, None) as workers,
        closing(training_steps(config, run, workers)) as steps,
    ):
        assert isinstance(workers.rollouts, LiveRollouts), "this run is not a replay"
        next(steps)  # compiles kernels and allocates
        with traced(workers.trainer.ranks, workers.rollouts.engines, folder, trace):
            next(steps)
        workers.trainer.gpus.start_update()
        yield workers.trainer.ranks
    # no finally: after an error the user needs the logs
    shutil.rmtree(folder)
