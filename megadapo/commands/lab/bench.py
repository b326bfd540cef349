"""`megadapo bench`: measure against installed baselines."""

from __future__ import annotations

import argparse
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

from megadapo.commands.common import Commands, Spinner, add_command, load_checked
from megadapo.errors import ConfigError

if TYPE_CHECKING:
    from megadapo.config import RunConfig
    from megadapo.observe.metrics.records import MetricRecord


def add(commands: Commands) -> None:
    parser = add_command(commands, "bench", "measure against installed baselines")
    benches = parser.add_subparsers(metavar="BENCH", required=True)
    _add_head(benches)
    _add_weights(benches)
    _add_rollout(benches)
    _add_step(benches)
    _add_soak(benches)


def _add_head(benches: Commands) -> None:
    summary = "time, memory and error of the policy head and its baselines"
    parser = add_command(benches, "head", summary)
    parser.add_argument(
        "--shape",
        action="append",
        metavar="T,H,V,DTYPE",
        help="a shape such as 20480,5120,152064,bfloat16; repeatable",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there")
    parser.add_argument("--threads", type=int, default=2, help="threads on the CPU (default 2)")
    parser.add_argument("--repeats", type=int, default=20, help="timed rounds (default 20)")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu counts CPU time only: for a busy machine, with --threads 1",
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="only baselines with TEXT in their name",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.set_defaults(run=_run_head)


def _run_head(arguments: argparse.Namespace) -> int:
    from megadapo.lab.bench import head

    head.run(
        arguments.shape or [],
        device_name=arguments.device,
        num_threads=arguments.threads,
        repeats=arguments.repeats,
        clock=arguments.clock,
        temperature=arguments.temperature,
        only=arguments.only,
        json_file=arguments.json,
    )
    return 0


def _add_weights(benches: Commands) -> None:
    summary = "time and memory of a weight update, shard to shard and by gathering full tensors"
    parser = add_command(benches, "weights", summary)
    parser.add_argument("--layers", type=int, default=8, help="decoder layers of the model")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size of the model")
    parser.add_argument("--vocab", type=int, default=32000, help="vocabulary of the model")
    parser.add_argument("--trainer-tp", type=int, default=2, help="trainer tensor parallelism")
    parser.add_argument("--trainer-pp", type=int, default=1, help="trainer pipeline parallelism")
    parser.add_argument("--engine-tp", type=int, default=1, help="engine tensor parallelism")
    parser.add_argument("--bucket-mib", type=float, default=16.0, help="weights.bucket_mib")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions; the best counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.set_defaults(run=_run_weights)


def _run_weights(arguments: argparse.Namespace) -> int:
    from megadapo.lab.bench import weights

    weights.run(
        weights.Setting(
            layers=arguments.layers,
            hidden=arguments.hidden,
            vocab=arguments.vocab,
            trainer_tp=arguments.trainer_tp,
            trainer_pp=arguments.trainer_pp,
            engine_tp=arguments.engine_tp,
            bucket_mib=arguments.bucket_mib,
            repeat=arguments.repeat,
        ),
        json_file=arguments.json,
    )
    return 0


def _add_rollout(benches: Commands) -> None:
    summary = "time to a full batch on real engines, in rounds and by streaming"
    parser = add_command(benches, "rollout", summary, takes_overrides=True)
    parser.add_argument("config", help="recipe (TOML), or the folder of a run")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each mode (default 8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.set_defaults(run=_run_rollout, resume=None)


def _run_rollout(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from megadapo.lab.bench import rollout

    config, _ = load_checked(arguments)
    console = Console()
    rollout.run(
        config,
        num_steps=arguments.steps,
        console=console,
        phases=Spinner(console),
        json_file=arguments.json,
    )
    return 0


def _add_step(benches: Commands) -> None:
    summary = "time of whole training steps, alternating with TRL's"
    parser = add_command(benches, "step", summary, takes_overrides=True)
    parser.add_argument("config", help="recipe (TOML)")
    parser.add_argument(
        "--trl-python", type=Path, metavar="PATH", help="Python of an environment with TRL"
    )
    parser.add_argument(
        "--trl",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of TRL's GRPOConfig, its value as JSON or bare text; repeatable",
    )
    parser.add_argument("--steps", type=int, default=16, help="measured steps (default 16)")
    parser.add_argument(
        "--warmup", type=int, default=4, help="steps before the measured ones (default 4)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.set_defaults(run=_run_step)


def _run_step(arguments: argparse.Namespace) -> int:
    import tempfile
    from contextlib import closing

    from megadapo.config import load_config
    from megadapo.lab.bench import step
    from megadapo.run.sampling import load_training_prompts

    if arguments.steps < 1 or arguments.warmup < 1:
        raise ConfigError(
            "--steps and --warmup must be at least 1: the first step includes the start"
        )
    num_steps = arguments.warmup + arguments.steps
    python = step.check_python(arguments.trl_python)
    with tempfile.TemporaryDirectory(prefix="megadapo-bench-") as folder:
        fixed = [
            f"run.folder={folder}/run",
            f"run.num_steps={num_steps + 1}",
            *step.OVERRIDES,
        ]
        config = load_config(arguments.config, [*fixed, *arguments.overrides])
        with closing(_steps(config)) as records:
            step.compare(
                config,
                records,
                load_training_prompts(config),
                trl_python=python,
                trl_arguments=step.parse_arguments(arguments.trl),
                warmup=arguments.warmup,
                num_steps=num_steps,
                json_file=arguments.json,
            )
    return 0


def _add_soak(benches: Commands) -> None:
    summary = "growth of memory and of step time over many steps of a recipe"
    parser = add_command(benches, "soak", summary, takes_overrides=True)
    parser.add_argument("config", help="recipe (TOML)")
    parser.add_argument("--steps", type=int, default=500, help="steps (default 500)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.set_defaults(run=_run_soak)


def _run_soak(arguments: argparse.Namespace) -> int:
    import tempfile
    from contextlib import closing

    from megadapo.config import load_config
    from megadapo.lab.bench import soak

    num_steps = arguments.steps
    if num_steps < soak.FEWEST_STEPS:
        raise ConfigError(f"--steps must be at least {soak.FEWEST_STEPS}")
    with tempfile.TemporaryDirectory(prefix="megadapo-bench-") as folder:
        fixed = [f"run.folder={folder}/run", f"run.num_steps={num_steps}"]
        config = load_config(arguments.config, [*fixed, *arguments.overrides])
        with closing(_steps(config)) as records:
            holds = soak.run(
                records,
                num_steps=num_steps,
                save_every=config.checkpoint.every,
                json_file=arguments.json,
            )
    return 0 if holds else 1


def _steps(config: RunConfig) -> Generator[MetricRecord, None, None]:
    """Train a recipe; yield the record of each step."""
    from megadapo.run.launch import start_workers
    from megadapo.run.run import Run
    from megadapo.train import training_steps

    with Run.open(config) as run, start_workers(config, run, None) as workers:
        yield from training_steps(config, run, workers)
