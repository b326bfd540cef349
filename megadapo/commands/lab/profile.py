"""`megadapo profile`: compile report of the kernels, or time of a step or of the policy head."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megadapo.commands.common import Commands, add_command
from megadapo.errors import ConfigError
from megadapo.observe.tables import print_error

if TYPE_CHECKING:
    from megadapo.config import RunConfig
    from megadapo.trainer.trainer import Trainer


def add(commands: Commands) -> None:
    summary = "report how all kernels compile, or the time of a training step or the head by kernel"
    parser = add_command(commands, "profile", summary, takes_overrides=True)
    subject = parser.add_mutually_exclusive_group()
    subject.add_argument("--step", metavar="CONFIG", help="profile a recipe's training step")
    subject.add_argument("--head", metavar="T,H,V,DTYPE[,TP]", help="profile the policy head alone")
    parser.add_argument(
        "--sequences", type=int, default=0, help="with --step: sequences (default: a mini-batch)"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="with --head (default: cuda if there)"
    )
    parser.add_argument("--steps", type=int, default=3, help="profiled steps (default 3)")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="also write a trace for Perfetto (.json or .json.gz): with --step a whole step of all "
        "trainer ranks and engines, with --head the head's",
    )
    parser.add_argument(
        "--memory",
        type=Path,
        metavar="FOLDER",
        help="with --step on GPUs: also write a memory snapshot of each rank during an update",
    )
    parser.add_argument(
        "--nvtx",
        action="store_true",
        help="with --step on GPUs, under nsys profile --capture-range=cudaProfilerApi: NVTX ranges "
        "in place of the table",
    )
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
    if (arguments.memory or arguments.nvtx) and arguments.step is None:
        raise ConfigError("--memory and --nvtx need --step")
    if arguments.step is not None:
        _profile_step(arguments)
    elif arguments.head is not None:
        from megadapo.lab.profiling.profiles import profile_head

        profile_head(
            arguments.head,
            device_name=arguments.device,
            num_steps=arguments.steps,
            trace=arguments.trace,
        )
    else:
        from megadapo.lab.profiling import compile_report

        results, failures = compile_report.compile_all(
            arguments.arch or compile_report.ARCHITECTURES
        )
        print(compile_report.format_compile_report(results))
        for failure in failures:
            print_error(failure)
        return 1 if failures else 0
    return 0


def _profile_step(arguments: argparse.Namespace) -> None:
    """Profile updates of a recipe's own trainer on random tokens, after an optional traced step."""
    from megadapo.config import load_config
    from megadapo.lab.profiling.profiles import Updates, profile_training_step, trainer_alone

    trace: Path | None = arguments.trace
    overrides = arguments.overrides
    if trace is not None:
        # all nodes that share the trace's folder share this one
        folder = trace.absolute().with_name(f"{trace.name}.parts")
        own = (f"run.folder={folder}", 'run.resume="never"')
        overrides = [*own, "evaluation.every=0", "checkpoint.every=1000000", *overrides]
    config = load_config(arguments.step, overrides)
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
