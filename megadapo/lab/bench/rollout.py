"""Filling batches on real engines: rounds that wait for their longest answer, and streaming.

Same engines, prompts, seeds and weights; the ways take turns, step by step, so that a slow minute
hits each of them. Groups are dealt out to the engines by load for all of them.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadapo.config import RunConfig, to_dict
from megadapo.rollout.config import SamplingConfig

if TYPE_CHECKING:
    from rich.console import Console

    from megadapo.rollout.sampling.sampled_batch import SampledBatch
    from megadapo.rollout.sampling.sampler import Sampler
    from megadapo.run.sampling import Phases


SECTIONS = ("model", "data", "rollout", "sampling")
"""Of the configuration, what decides a measurement."""


@dataclass(kw_only=True)
class Way:
    """One way of filling batches, and what its steps came to."""

    name: str
    settings: dict[str, Any]
    """Keys of [sampling]."""
    seconds: list[float] = field(default_factory=list)
    tokens_generated: int = 0
    tokens_kept: int = 0
    """Response tokens of the groups in the batches."""
    num_sampled: int = 0
    lengths: list[float] = field(default_factory=list)
    """Mean response length of each batch."""
    slot_use: list[float] = field(default_factory=list)

    def count(self, batch: SampledBatch, seconds: float) -> None:
        """Take in one step."""
        self.seconds.append(seconds)
        self.num_sampled += batch.num_sampled
        self.tokens_generated += sum(engine.num_tokens for engine in batch.engines)
        kept = [n for group in batch.groups for n in group.lengths]
        self.tokens_kept += sum(kept)
        self.lengths.append(statistics.fmean(kept))
        total = sum(engine.seconds for engine in batch.engines)
        running = sum(engine.mean_running * engine.busy_seconds for engine in batch.engines)
        self.slot_use.append(running / total if total else math.nan)

    def result(self) -> dict[str, Any]:
        """Means over the steps, as JSON holds them."""
        spread = statistics.stdev(self.seconds) if len(self.seconds) > 1 else math.nan
        return {
            "name": self.name,
            "settings": self.settings,
            "seconds": statistics.fmean(self.seconds),
            "seconds_standard_error": spread / math.sqrt(len(self.seconds)),
            "groups_sampled": self.num_sampled / len(self.seconds),
            "tokens_generated_per_token_kept": self.tokens_generated / self.tokens_kept,
            "length_of_kept_groups": statistics.fmean(self.lengths),
            "slot_use": statistics.fmean(self.slot_use),
        }


def ways(prompts_per_step: int) -> list[Way]:
    """The ways that are compared; the first is what ratios are of."""
    return [
        Way(
            name="rounds of three batches (verl)",
            settings={"mode": "rounds", "prompts_per_round": 3 * prompts_per_step},
        ),
        Way(name="rounds of one batch", settings={"mode": "rounds"}),
        Way(name="sync", settings={"mode": "sync"}),
        Way(name="partial", settings={"mode": "partial", "max_staleness": 1}),
    ]


def run(
    config: RunConfig,
    *,
    num_steps: int,
    console: Console,
    phases: Phases,
    json_file: Path | None,
) -> None:
    """Measure `num_steps` steps of each way, print a table, and write it down if asked to."""
    from rich.progress import track

    compared = ways(config.sampling.prompts_per_step)
    with tempfile.TemporaryDirectory(prefix="megadapo-bench-") as folder, ExitStack() as stack:
        samplers = _start(config, compared, Path(folder), stack, phases)
        # the first turn fills caches and estimates, and the second begins with them
        for turn in track(range(2 + num_steps), description="steps", console=console):
            for way, sampler in zip(compared, samplers, strict=True):
                started = time.perf_counter()
                batch = sampler.next_batch()
                if turn >= 2:
                    way.count(batch, time.perf_counter() - started)
    results = [way.result() for way in compared]
    _print_table(results, console)
    if json_file is not None:
        json_file.write_text(json.dumps(_report(config, num_steps, results), indent=2) + "\n")


def _start(
    config: RunConfig, compared: list[Way], folder: Path, stack: ExitStack, phases: Phases
) -> list[Sampler]:
    """Engines with the weights of model.path, and a sampler for each way."""
    from megadapo.run.processes import start_engines_alone
    from megadapo.run.sampling import SamplingInputs

    inputs = SamplingInputs.start(config, phases, stack)
    engines = start_engines_alone(config, phases, stack, log_folder=folder)
    return [inputs.sampler(_with(config, way.settings), engines) for way in compared]


def _with(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The configuration with other ways of sampling, all else equal."""
    plain = config.sampling.model_dump(
        exclude={"mode", "prompts_per_round", "max_staleness", "reserve_limit"}
    )
    sampling = SamplingConfig(**{**plain, **settings})
    return config.model_copy(update={"sampling": sampling})


def _print_table(results: list[dict[str, Any]], console: Console) -> None:
    from rich.table import Table

    table = Table(title="time to a full batch")
    for column in ("way", "seconds", "ratio", "groups", "generated / kept", "length", "slots used"):
        table.add_column(column, justify="left" if column == "way" else "right")
    base = results[0]["seconds"]
    for one in results:
        table.add_row(
            one["name"],
            f"{one['seconds']:.2f} +- {one['seconds_standard_error']:.2f}",
            f"{one['seconds'] / base:.2f}",
            f"{one['groups_sampled']:.0f}",
            f"{one['tokens_generated_per_token_kept']:.2f}",
            f"{one['length_of_kept_groups']:.1f}",
            f"{one['slot_use']:.2f}",
        )
    console.print(table)


def _report(config: RunConfig, num_steps: int, results: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "versions": {name: metadata.version(name) for name in ("torch", "ray")},
        "steps": num_steps,
        "config": {
            name: to_dict(config)[name] for name in ("model", "data", "rollout", "sampling")
        },
        "ways": results,
    }
