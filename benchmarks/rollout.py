"""Time to a full batch on real engines, in each sampling mode.

All modes use the same engines, prompts, seeds, weights and dispatch. They alternate step by step,
so that a slow minute affects all of them.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track
from shared import script_parser, write_results

from megadapo.cli import parse, report_errors
from megadapo.commands.common import load_checked
from megadapo.config import RunConfig, to_dict
from megadapo.observe.progress import Spinner
from megadapo.observe.tables import TextTable
from megadapo.rollout.config import SamplingConfig

if TYPE_CHECKING:
    from megadapo.rollout.sampling.sampler import Sampler
    from megadapo.rollout.sampling.statistics import SampledBatch
    from megadapo.run.inputs import Phases


SECTIONS = ("model", "data", "rollout", "sampling")
"""Sections of the configuration in the JSON file."""


@dataclass(kw_only=True)
class SamplingMode:
    """One way to fill batches, and the measurements of its steps."""

    name: str
    settings: dict[str, Any]
    """Keys in [sampling]."""
    steps: list[dict[str, float]] = field(default_factory=list)

    def count(self, batch: SampledBatch, seconds: float) -> None:
        """Add one step."""
        kept = [n for group in batch.groups for n in group.lengths]
        engines = batch.engines
        total = sum(engine.seconds for engine in engines)
        running = sum(engine.mean_running * engine.busy_seconds for engine in engines)
        self.steps.append(
            {
                "seconds": seconds,
                "groups_sampled": len(batch.stats),
                "tokens_generated": sum(engine.num_tokens for engine in engines),
                "tokens_kept": sum(kept),
                "length_of_kept_groups": statistics.fmean(kept),
                "slot_use": running / total if total else math.nan,
            }
        )

    def result(self) -> dict[str, Any]:
        """Return means over the steps as JSON values."""
        means = {
            name: statistics.fmean(step[name] for step in self.steps) for name in self.steps[0]
        }
        seconds = [step["seconds"] for step in self.steps]
        spread = statistics.stdev(seconds) if len(seconds) > 1 else math.nan
        generated, kept = means.pop("tokens_generated"), means.pop("tokens_kept")
        return {
            "name": self.name,
            "settings": self.settings,
            **means,
            "seconds_standard_error": spread / math.sqrt(len(seconds)),
            "tokens_generated_per_token_kept": generated / kept,
        }


def sampling_modes(prompts_per_step: int) -> list[SamplingMode]:
    """Return the compared modes; ratios refer to the first."""
    return [
        SamplingMode(
            name="rounds of three batches (verl)",
            settings={"mode": "rounds", "prompts_per_round": 3 * prompts_per_step},
        ),
        SamplingMode(name="rounds of one batch", settings={"mode": "rounds"}),
        SamplingMode(name="sync", settings={"mode": "sync"}),
        SamplingMode(name="partial", settings={"mode": "partial", "max_staleness": 1}),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the steps of each mode, print a table, and write JSON if requested."""
    arguments = parse(script_parser(__doc__, num_steps=8), argv)
    config, _ = load_checked(arguments)
    console = Console()
    modes = sampling_modes(config.sampling.prompts_per_step)
    with tempfile.TemporaryDirectory(prefix="megadapo-bench-") as folder, ExitStack() as stack:
        samplers = _start(config, modes, Path(folder), stack, Spinner(console))
        # two turns warm up: the first fills caches and estimates, the second starts with them
        for turn in track(range(2 + arguments.steps), description="steps", console=console):
            for mode, sampler in zip(modes, samplers, strict=True):
                started = time.perf_counter()
                batch = sampler.next_batch()
                if turn >= 2:
                    mode.count(batch, time.perf_counter() - started)
    results = [mode.result() for mode in modes]
    print(_table(results))
    sections = {name: to_dict(config)[name] for name in SECTIONS}
    record = {"steps": arguments.steps, "config": sections, "modes": results}
    write_results(arguments.json, record)
    return 0


def _start(
    config: RunConfig, modes: list[SamplingMode], folder: Path, stack: ExitStack, phases: Phases
) -> list[Sampler]:
    """Start engines with the weights of model.path, and a sampler for each mode."""
    from megadapo.run.inputs import SamplingInputs
    from megadapo.run.processes import start_engines_alone

    inputs = SamplingInputs.start(config, phases, stack)
    engines, _ = start_engines_alone(config, phases, stack, log_folder=folder)
    return [inputs.sampler(_with(config, mode.settings), engines) for mode in modes]


def _with(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with other sampling keys."""
    plain = config.sampling.model_dump(exclude={"mode", "prompts_per_round", "max_staleness"})
    sampling = SamplingConfig(**{**plain, **settings})
    return config.model_copy(update={"sampling": sampling})


def _table(results: list[dict[str, Any]]) -> str:
    base = results[0]["seconds"]
    rows = [
        [
            one["name"],
            f"{one['seconds']:.2f} +- {one['seconds_standard_error']:.2f}",
            f"{one['seconds'] / base:.2f}",
            f"{one['groups_sampled']:.0f}",
            f"{one['tokens_generated_per_token_kept']:.2f}",
            f"{one['length_of_kept_groups']:.1f}",
            f"{one['slot_use']:.2f}",
        ]
        for one in results
    ]
    head = ["mode", "seconds", "ratio", "groups", "generated / kept", "length", "slots used"]
    return TextTable(title="time to a full batch", head=head, rows=rows).text()


if __name__ == "__main__":
    sys.exit(report_errors(main))
