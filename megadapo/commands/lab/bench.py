"""`megadapo bench`: measure against installed baselines."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from megadapo.commands.common import Commands, Spinner, add_command, load_checked
from megadapo.errors import ConfigError

if TYPE_CHECKING:
    from megadapo.config import RunConfig
    from megadapo.observe.metrics.records import MetricRecord

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))


def add(commands: Commands) -> None:
    parser = add_command(commands, "bench", "measure against installed baselines")
    benches = parser.add_subparsers(metavar="BENCH", required=True)
    _add_head(benches)
    _add_weights(benches)
    rollout = _add_recipe_bench(
        benches,
        "rollout",
        "time to a full batch on real engines, in each sampling mode",
        num_steps=8,
    )
    rollout.set_defaults(run=_run_rollout, resume=None)
    _add_environments(benches)
    _add_step(benches)
    _add_driver(benches)
    soak = _add_recipe_bench(
        benches, "soak", "growth of memory and of step time over many steps", num_steps=500
    )
    soak.set_defaults(run=_run_soak)


def _add_bench(
    benches: Commands, name: str, summary: str, *, takes_overrides: bool = False
) -> argparse.ArgumentParser:
    parser = add_command(benches, name, summary, takes_overrides=takes_overrides)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    return parser


def _add_recipe_bench(
    benches: Commands, name: str, summary: str, *, num_steps: int
) -> argparse.ArgumentParser:
    parser = _add_bench(benches, name, summary, takes_overrides=True)
    parser.add_argument("config", help="recipe (TOML)")
    parser.add_argument(
        "--steps", type=int, default=num_steps, help=f"measured steps (default {num_steps})"
    )
    return parser


def _add_head(benches: Commands) -> None:
    summary = "time, memory and error of the policy head and its baselines"
    parser = _add_bench(benches, "head", summary)
    parser.add_argument(
        "--shape",
        action="append",
        metavar="T,H,V,DTYPE[,TP]",
        help="a shape such as 20480,5120,152064,bfloat16, with TP one rank's part of a split "
        "vocabulary; repeatable",
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
    parser.set_defaults(run=_run_head)


def _run_head(arguments: argparse.Namespace) -> int:
    import head

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
    parser = _add_bench(benches, "weights", summary)
    for name, default, meaning in (
        ("layers", 8, "decoder layers of the model"),
        ("hidden", 512, "hidden size of the model"),
        ("vocab", 32000, "vocabulary of the model"),
        ("trainer-tp", 2, "trainer tensor parallelism"),
        ("trainer-pp", 1, "trainer pipeline parallelism"),
        ("engine-tp", 1, "engine tensor parallelism"),
        ("bucket-mib", 16.0, "weights.bucket_mib"),
        ("repeat", 5, "repetitions; the best counts"),
    ):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=meaning)
    parser.set_defaults(run=_run_weights)


def _run_weights(arguments: argparse.Namespace) -> int:
    import weights

    names = [field.name for field in fields(weights.Setting)]
    setting = weights.Setting(**{name: getattr(arguments, name) for name in names})
    weights.run(setting, json_file=arguments.json)
    return 0


def _run_rollout(arguments: argparse.Namespace) -> int:
    import rollout
    from rich.console import Console

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


def _add_environments(benches: Commands) -> None:
    summary = "speed of an engine whose conversations wait for a slow environment"
    parser = _add_bench(benches, "environments", summary)
    for name, default, meaning in (
        ("conversations", 64, "conversations in flight"),
        ("slots", 64, "responses that the engine generates at the same time"),
        ("turns", 4, "turns of a conversation"),
        ("tokens", 64, "mean length of a turn"),
        ("delay", 0.2, "seconds that the environment takes for an answer"),
        ("layers", 4, "decoder layers of the model"),
        ("hidden", 512, "hidden size of the model"),
        ("rounds", 4, "measured rounds"),
    ):
        parser.add_argument(
            f"--{name}", type=type(default), default=default, help=f"{meaning} (default {default})"
        )
    parser.set_defaults(run=_run_environments)


def _run_environments(arguments: argparse.Namespace) -> int:
    import environments
    from rich.console import Console

    names = [field.name for field in fields(environments.Setting)]
    setting = environments.Setting(**{name: getattr(arguments, name) for name in names})
    counts = ("conversations", "slots", "turns", "tokens", "layers", "rounds")
    if min(getattr(setting, name) for name in counts) < 1 or setting.delay < 0:
        raise ConfigError("every count must be at least 1, and --delay at least 0")
    if setting.hidden < 64 or setting.hidden % 64:
        raise ConfigError("--hidden must be a multiple of 64, the size of an attention head")
    environments.run(setting, phases=Spinner(Console()), json_file=arguments.json)
    return 0


def _add_step(benches: Commands) -> None:
    summary = "time of whole training steps, and to an accuracy, alternating with TRL's"
    parser = _add_recipe_bench(benches, "step", summary, num_steps=16)
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
    parser.add_argument(
        "--warmup", type=int, default=4, help="steps before the measured ones (default 4)"
    )
    parser.add_argument(
        "--accuracy",
        type=float,
        metavar="X",
        help="evaluate as the recipe does, and count the seconds to this held-out accuracy",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        metavar="K",
        help="seeds from run.seed on, with --accuracy (default 1)",
    )
    parser.set_defaults(run=_run_step, resume=None)


def _run_step(arguments: argparse.Namespace) -> int:
    import step
    import to_accuracy
    from baselines.trl_baseline import check_python, parse_arguments

    accuracy, warmup = arguments.accuracy, arguments.warmup
    if arguments.steps < 1 or warmup < 1:
        raise ConfigError("--steps and --warmup must be at least 1: the first step is slower")
    if accuracy is None and arguments.seeds is not None:
        raise ConfigError("--seeds is used only with --accuracy")
    python, config = check_python(arguments.trl_python), load_checked(arguments)[0]
    overrides = step.OVERRIDES + (step.SPEED_ALONE if accuracy is None else step.WITH_ACCURACY)
    if accuracy is not None:
        to_accuracy.check(config, accuracy, arguments.seeds or 1)
    num_steps = warmup + arguments.steps
    runs = {}
    for seed in range(config.run.seed, config.run.seed + (arguments.seeds or 1)):
        # the last step saves
        with _training_records(arguments, num_steps + 1, overrides, seed) as (config, records):
            runs[seed] = step.take_turns(
                config,
                records,
                trl_python=python,
                trl_arguments=parse_arguments(arguments.trl),
                num_steps=num_steps,
            )
        if accuracy is None:
            step.report(runs[seed], warmup, arguments.json)
        else:
            to_accuracy.report(runs, accuracy, warmup, arguments.json)
    return 0


def _add_driver(benches: Commands) -> None:
    summary = "time and memory of the driver's own work on a step of the paper's size"
    parser = _add_bench(benches, "driver", summary)
    for name, default, meaning in (
        ("groups", 512, "groups of the step"),
        ("responses", 16, "responses of a group"),
        ("tokens", 5000, "mean length of a response"),
        ("steps", 3, "measured steps; memory is fresh in the first"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{meaning} (default {default})"
        )
    parser.set_defaults(run=_run_driver)


def _run_driver(arguments: argparse.Namespace) -> int:
    import driver

    if min(arguments.groups, arguments.responses, arguments.tokens, arguments.steps) < 1:
        raise ConfigError("--groups, --responses, --tokens and --steps must be at least 1")
    driver.run(
        arguments.groups,
        arguments.responses,
        arguments.tokens,
        num_steps=arguments.steps,
        json_file=arguments.json,
    )
    return 0


def _run_soak(arguments: argparse.Namespace) -> int:
    import soak

    if arguments.steps < soak.FEWEST_STEPS:
        raise ConfigError(f"--steps must be at least {soak.FEWEST_STEPS}")
    with _training_records(arguments, arguments.steps) as (config, records):
        holds = soak.run(
            records,
            num_steps=arguments.steps,
            save_every=config.checkpoint.every,
            json_file=arguments.json,
        )
    return 0 if holds else 1


@contextmanager
def _training_records(
    arguments: argparse.Namespace,
    num_steps: int,
    overrides: Iterable[str] = (),
    seed: int | None = None,
) -> Iterator[tuple[RunConfig, Iterator[MetricRecord]]]:
    """Train a recipe in a folder of its own; yield its configuration, and each step's record."""
    from megadapo.config import load_config
    from megadapo.run.launch import start_workers
    from megadapo.run.run import Run
    from megadapo.train import training_steps

    with tempfile.TemporaryDirectory(prefix="megadapo-bench-") as folder:
        chosen = [f"run.folder={folder}/run", *overrides, *arguments.overrides]
        chosen.append(f"run.num_steps={num_steps}")
        chosen += [] if seed is None else [f"run.seed={seed}"]
        config = load_config(arguments.config, chosen)

        def steps() -> Generator[MetricRecord, None, None]:
            with Run.open(config) as run, start_workers(config, run, None) as workers:
                yield from training_steps(config, run, workers)

        with closing(steps()) as records:
            yield config, records
