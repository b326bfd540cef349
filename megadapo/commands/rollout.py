"""`megadapo rollout`: sample and score without a trainer."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from megadapo.commands.common import Commands, add_command, load_checked
from megadapo.errors import ConfigError

if TYPE_CHECKING:
    from megadapo.config import RunConfig
    from megadapo.run.rollout_only import Keep, RolloutStep

ABOUT = """Sample and score the batches of a run's first steps from the weights in model.path,
without a trainer. Save observe.saved_groups groups of each in run.folder + "-rollout". The
batch of step 1 is the same as in training; later ones differ, because the weights do not change.
For a checkpoint: megadapo export RUN FOLDER, then --model.path=FOLDER."""

COLUMNS = (
    *("step", "sampled", "kept", "all correct", "all incorrect", "accuracy", "reward"),
    *("length", "p95", "truncated", "reward s", "disagreed"),
)


def add(commands: Commands) -> None:
    parser = add_command(
        commands, "rollout", "sample and score without a trainer", takes_overrides=True
    )
    parser.description = ABOUT
    parser.add_argument("config", help="recipe (TOML), or the folder of a run")
    parser.add_argument(
        "--steps", type=int, default=1, metavar="N", help="batches to sample; default: 1"
    )
    parser.add_argument(
        "--keep",
        choices=["correct", "pairs"],
        help="also write rows to correct.jsonl or pairs.jsonl in the same folder: the correct and "
        "complete responses of all prompts, mixed groups or not, for megadapo sft; or pairs of a "
        "correct and an incorrect response to one prompt, for megadapo reward-model",
    )
    parser.add_argument(
        "--max-per-prompt",
        type=int,
        metavar="N",
        help="with --keep: write at most N different responses, or N pairs, of a prompt; default: "
        "all",
    )
    parser.set_defaults(run=run, resume=None)


def run(arguments: argparse.Namespace) -> int:
    if arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps} must be at least 1")
    most = arguments.max_per_prompt
    if most is not None and (arguments.keep is None or most < 1):
        raise ConfigError(f"--max-per-prompt {most} must be at least 1, and needs --keep")
    config, _ = load_checked(arguments, trains=False)
    sample_steps(config, num_steps=arguments.steps, keep=arguments.keep, max_per_prompt=most)
    return 0


def sample_steps(
    config: RunConfig, *, num_steps: int, keep: Keep | None, max_per_prompt: int | None
) -> list[RolloutStep]:
    """Sample steps 1 to `num_steps`, print lines on each and a table of all, and return them.

    Args:
        keep: rows to write of the responses; None writes none.
        max_per_prompt: number of rows of one prompt to write; None writes all.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from megadapo.observe.progress import Spinner
    from megadapo.observe.tables import TextTable, printable
    from megadapo.run.rollout_only import (
        keeping_every_group,
        kept_rows,
        rollout_folder,
        start_rollouts,
    )

    config = config if keep is None else keeping_every_group(config, keep)
    console = Console()
    columns = (TextColumn("sample"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    done: list[RolloutStep] = []
    show = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    engines = start_rollouts(config, Spinner(console), lambda line: show(printable(line)))
    bar = Progress(*columns, console=console, transient=True)
    with engines as (sample, episodes), bar as progress:
        rows = keep and kept_rows(config, keep, episodes, max_per_prompt=max_per_prompt)
        for step in progress.track(range(1, num_steps + 1)):
            done.append(sample(step))
            if rows is not None:
                rows.add(entry.group for entry in done[-1].sampled.saved)
            show(_line(done[-1]))
            sampled = done[-1].sampled
            for line in _environment_lines({**sampled.reward_parts, **sampled.counts}):
                show(printable(line))
    title = "groups, and the responses of all groups sampled"
    print(TextTable(title=title, head=COLUMNS, rows=[_cells(one) for one in done]).text())
    if rows is not None:
        show(f"{rows.summary}; the rows are in {rollout_folder(config) / rows.path.name}")
    if config.observe.saved_groups != 0:
        show(f"Read the responses:  megadapo show {rollout_folder(config)}")
    return done


def _environment_lines(parts: Mapping[str, float]) -> Iterator[str]:
    """Yield a line for each environment with the means of what it counted."""
    found = defaultdict(list)
    for name, mean in parts.items():
        kind, _, rest = name.partition("/")
        if kind == "environment" and rest:
            label, _, counted = rest.partition("/")
            found[label].append(f"{counted}={mean:.4g}")
    for label, values in found.items():
        yield f"environment {label}: {' '.join(values)}"


def _cells(done: RolloutStep) -> tuple[str, ...]:
    """Return one step's text for each of COLUMNS."""
    import numpy as np

    sampled = done.sampled
    lengths: list[float] = [*sampled.response_lengths] or [np.nan]
    return (
        str(done.step),
        *(str(len(sampled.stats)), str(len(sampled.groups))),
        *(str(sampled.num_at("all_correct")), str(sampled.num_at("all_wrong"))),
        "-" if np.isnan(sampled.accuracy) else f"{sampled.accuracy:.4f}",
        f"{sampled.reward_mean:.4f}",
        *(f"{np.mean(lengths):.1f}", f"{np.quantile(lengths, 0.95):.1f}"),
        f"{sampled.truncated_fraction:.4f}",
        f"{sampled.counts['time/reward_s']:.2f}",
        str(done.num_disagreements),
    )


def _line(done: RolloutStep) -> str:
    pairs = zip(COLUMNS, _cells(done), strict=True)
    return " ".join(f"{name.replace(' ', '_')}={text}" for name, text in pairs)
