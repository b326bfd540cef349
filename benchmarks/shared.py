"""Command lines, random models, runs, records and measures that the benchmarks share."""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from baselines.measure import Clock, reset_resident_peak, resident_peak, time_once

from megadapo.cluster.processes import MIB, return_freed_memory
from megadapo.commands.common import OVERRIDES
from megadapo.config import RunConfig, load_config
from megadapo.errors import ConfigError
from megadapo.lab.record import write_record
from megadapo.observe.metrics.records import MetricRecord

HEAD_DIM = 64
Number = tuple[str, float, str]
"""Name of an option, its default, and its meaning."""


def script_parser(doc: str | None, *, num_steps: int = 0) -> argparse.ArgumentParser:
    """Return the parser of a script; with `num_steps`, their default, the script takes a recipe."""
    parser = argparse.ArgumentParser(
        description=doc,
        epilog=OVERRIDES if num_steps else "",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.set_defaults(takes_overrides=bool(num_steps), resume=None)
    if num_steps:
        parser.add_argument("config", help="recipe (TOML)")
        add_numbers(parser, [("steps", num_steps, "measured steps")])
    return parser


def add_numbers(parser: argparse.ArgumentParser, numbers: Iterable[Number]) -> None:
    """Declare an option for each number: counts of at least 1, and floats that are not negative."""
    for name, default, meaning in numbers:
        parser.add_argument(
            f"--{name}",
            type=_count if isinstance(default, int) else _amount,
            default=default,
            help=f"{meaning} (default {default:g})",
        )


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value


def _amount(text: str) -> float:
    if not (value := float(text)) >= 0.0:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 0")
    return value


def chosen(arguments: argparse.Namespace, numbers: Iterable[Number]) -> dict[str, float]:
    """Return the values of these numbers for the record."""
    names = [name.replace("-", "_") for name, _, _ in numbers]
    return {name: getattr(arguments, name) for name in names}


def write_results(file: Path | None, results: Mapping[str, Any]) -> None:
    """Write the record of a benchmark if --json names a file."""
    if file is not None:
        write_record(file, results)


def write_model(folder: Path, *, layers: int, hidden: int, dtype: str, **options: Any) -> int:
    """Write a random Qwen2 without a tokenizer; return its number of parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    if hidden % HEAD_DIM:
        raise ConfigError(f"--hidden={hidden}: must be a multiple of {HEAD_DIM}, an attention head")
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_DIM,
        dtype=dtype,
        **options,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    return sum(one.numel() for one in model.parameters())


@contextmanager
def training_records(
    arguments: argparse.Namespace,
    num_steps: int,
    overrides: Iterable[str] = (),
    seed: int | None = None,
) -> Iterator[tuple[RunConfig, Iterator[MetricRecord]]]:
    """Train a recipe in a folder of its own; yield its configuration, and each step's record."""
    from megadapo.loop import training_steps
    from megadapo.run.launch import start_workers
    from megadapo.run.run import Run

    with tempfile.TemporaryDirectory(prefix="megadapo-bench-") as folder:
        keys = [f"run.folder={folder}/run", *overrides, *arguments.overrides]
        keys.append(f"run.num_steps={num_steps}")
        keys += [] if seed is None else [f"run.seed={seed}"]
        config = load_config(arguments.config, keys)

        def steps() -> Generator[MetricRecord, None, None]:
            with Run.open(config) as run, start_workers(config, run, None) as workers:
                yield from training_steps(config, run, workers)

        with closing(steps()) as records:
            yield config, records


def time_together(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    warmup: int,
    repeats: int,
    clock: Clock = "wall",
) -> dict[str, list[float]]:
    """Return the milliseconds of all calls, which take turns in every round.

    So a slow minute affects all of them.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(warmup + repeats):
        for name, call in calls.items():
            elapsed = time_once(call, device, clock)
            if round_number >= warmup:
                samples[name].append(elapsed)
    return samples


def peak_extra_mib(call: Callable[[], object], device: torch.device) -> float | None:
    """Return the peak memory of a call in MiB, results included, above the memory before it.

    On the CPU this is the kernel's high-water mark of the process; None if it cannot be reset.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / MIB
    # otherwise the call could reuse freed memory that is still resident
    return_freed_memory()
    try:
        before = reset_resident_peak()
    except OSError:
        return None
    call()
    return (resident_peak() - before) / MIB
