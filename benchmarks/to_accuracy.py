"""Seconds of training to a held-out accuracy, alternating with TRL's steps, over seeds.

Both sides are evaluated as the recipe says. The table and the curves are written beside --json.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from shared import add_numbers
from step import Comparison, Side, compare, step_parser, summary

from megadapo.cli import parse, report_errors
from megadapo.commands.common import load_checked
from megadapo.config import RunConfig
from megadapo.errors import ConfigError
from megadapo.lab.ablation.measures import Spread
from megadapo.lab.ablation.report import PLUS_MINUS, cell, markdown
from megadapo.lab.record import write_record
from megadapo.observe.files import replace_text
from megadapo.observe.plot import COLOURS, STYLE, finish, save
from megadapo.observe.tables import TextTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EVALUATED_ALONE = ('evaluation.placement="alone"',)
"""Overrides with which evaluations do not overlap steps."""
COLUMNS = {
    "seconds_to_accuracy": ("seconds to accuracy", ".1f"),
    "steps_to_accuracy": ("steps to accuracy", ".1f"),
    "held_out_before": ("held-out before", ".3f"),
    "held_out_after": ("held-out after", ".3f"),
    "seconds_per_step": ("s a step", ".2f"),
    "rollout_seconds": ("rollout", ".2f"),
    "answers_per_s": ("answers/s", ".2f"),
    "tokens_per_s": ("tokens/s", ".1f"),
    "tokens_per_answer": ("length", ".1f"),
    "sampled_per_answer": ("sampled per trained", ".2f"),
}
"""Labels and formats of a run's measures, in the order of the table's columns."""
IS_LESS_BETTER = {
    "seconds_to_accuracy": True,
    "steps_to_accuracy": True,
    "seconds_per_step": True,
    "rollout_seconds": True,
    "answers_per_s": False,
    "tokens_per_s": False,
}
"""Measures in the row of ratios, and whether the smaller one is the better one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train with each seed, and report the finished ones after each."""
    parser = step_parser(__doc__)
    parser.add_argument(
        "--accuracy",
        type=_accuracy,
        required=True,
        metavar="X",
        help="held-out accuracy that ends the count of seconds",
    )
    add_numbers(parser, [("seeds", 1, "seeds from run.seed on")])
    arguments = parse(parser, argv)
    config, _ = load_checked(arguments)
    check(config)
    runs = {}
    for seed in range(config.run.seed, config.run.seed + arguments.seeds):
        runs[seed] = compare(arguments, EVALUATED_ALONE, seed)
        report(runs, arguments.accuracy, arguments.warmup, arguments.json)
    return 0


def _accuracy(text: str) -> float:
    if not 0.0 < (accuracy := float(text)) <= 1.0:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0 and at most 1")
    return accuracy


def check(config: RunConfig) -> None:
    """Check that the recipe is evaluated.

    Raises:
        ConfigError: it is not.
    """
    if config.data.held_out is None or config.evaluation.every == 0:
        raise ConfigError("an accuracy needs data.held_out, and evaluation.every above 0")


def report(
    runs: Mapping[int, Comparison], accuracy: float, warmup: int, json_file: Path | None
) -> None:
    """Print the table of the finished seeds; write JSON, and the table and curves beside it.

    Args:
        runs: both sides' runs by seed.
        accuracy: held-out accuracy that ends the count of seconds.
        warmup: number of first steps that do not count in speeds.
    """
    shown = table(runs, accuracy, warmup)
    print(shown.text(), end="\n\n")
    if json_file is None:
        return
    record = {
        "accuracy": accuracy,
        "warmup": warmup,
        "seeds": list(runs),
        "ratios": {
            name: None
            if (spread := ratio(runs, name, accuracy, warmup)) is None
            else asdict(spread)
            for name in IS_LESS_BETTER
        },
        "runs": {
            str(seed): {
                side.name: {
                    **measures(side, accuracy, warmup),
                    "steps": [asdict(one) for one in side.steps],
                    "held_out": [one._asdict() for one in side.held_out],
                }
                for side in run.sides
            }
            for seed, run in runs.items()
        },
        # the seeds differ in nothing else
        **next(iter(runs.values())).settings,
    }
    write_record(json_file, record)
    picture = json_file.with_suffix(".png")
    draw(runs, accuracy, picture)
    page = markdown("Training beside TRL", [shown])
    replace_text(
        json_file.with_suffix(".md"),
        f"{page}\n![Accuracy over seconds and steps]({picture.name})\n",
    )


def measures(side: Side, accuracy: float, warmup: int) -> dict[str, float | None]:
    """Return the measures of a run; None for an accuracy that it does not reach."""
    reached = next((one.step for one in side.held_out if one.accuracy >= accuracy), None)
    steps = side.steps[warmup:]
    speeds = summary(side, warmup)
    return {
        "seconds_to_accuracy": None if reached is None else seconds_until(side, reached),
        "steps_to_accuracy": None if reached is None else float(reached),
        "held_out_before": side.held_out[0].accuracy,
        "held_out_after": side.held_out[-1].accuracy,
        **{name: speeds[name] for name in COLUMNS if name in speeds},
        "sampled_per_answer": sum(one.num_sampled for one in steps)
        / sum(one.num_answers for one in steps),
    }


def seconds_until(side: Side, step: int) -> float:
    """Return the seconds of a run's first steps, without evaluations and the start."""
    return math.fsum(one.seconds for one in side.steps[:step])


def ratio(runs: Mapping[int, Comparison], name: str, accuracy: float, warmup: int) -> Spread | None:
    """Return how many times better our measure is than TRL's, over the seeds.

    None if a side does not reach the accuracy with some seed, or starts with it: the other seeds
    alone would show the faster runs.
    """
    found = []
    for run in runs.values():
        own, other = (measures(side, accuracy, warmup)[name] for side in run.sides)
        # an accuracy of the evaluation before training takes no seconds
        if not own or not other:
            return None
        found.append(other / own if IS_LESS_BETTER[name] else own / other)
    return Spread.of(found)


def table(runs: Mapping[int, Comparison], accuracy: float, warmup: int) -> TextTable:
    """Return both sides' measures over the seeds, and their ratios."""
    num = len(runs)
    rows = []
    for place, name in enumerate(side.name for side in next(iter(runs.values())).sides):
        found = [measures(run.sides[place], accuracy, warmup) for run in runs.values()]
        spreads = {key: Spread.of([one[key] for one in found]) for key in COLUMNS}
        rows.append([name, *(cell(spreads[key], form, num) for key, (_, form) in COLUMNS.items())])
    ratios = {name: ratio(runs, name, accuracy, warmup) for name in IS_LESS_BETTER}
    rows.append(["times better", *(cell(ratios.get(name), ".2f") for name in COLUMNS)])
    num_steps = max(len(side.steps) for run in runs.values() for side in run.sides)
    note = (
        f"Mean {PLUS_MINUS} standard error over {num} seed{'s' if num != 1 else ''} "
        f"({', '.join(map(str, runs))}), {num_steps} steps each. Seconds and steps to accuracy: to "
        f"{accuracy:g} held-out, as evaluations see it; (k/n): k of n runs reached it. Seconds are "
        "without start and evaluation. Answers and tokens are those trained on. Speeds are "
        f"medians, of tokens the mean, without the first {warmup} steps."
    )
    head = ["", *(label for label, _ in COLUMNS.values())]
    return TextTable(title="Seconds to an accuracy", note=note, head=head, rows=rows)


def draw(runs: Mapping[int, Comparison], accuracy: float, output: Path) -> None:
    """Draw the held-out accuracy of every run over its seconds of training, and over its steps."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        by_seconds, by_steps = figure.subplots(1, 2, sharey=True)
        by_seconds.set_title("Held-out accuracy")
        by_seconds.set_xlabel("seconds of training")
        for run in runs.values():
            for side, colour in zip(run.sides, COLOURS, strict=False):
                steps = [one.step for one in side.held_out]
                _curve(by_seconds, [seconds_until(side, step) for step in steps], side, colour)
                _curve(by_steps, [float(step) for step in steps], side, colour)
        for axes in (by_seconds, by_steps):
            axes.axhline(accuracy, color=COLOURS[-1], linewidth=0.8, linestyle=":")
            finish(axes)
        save(figure, output)


def _curve(axes: Axes, x_values: list[float], side: Side, colour: str) -> None:
    """Draw one run's accuracy in a band of its standard error."""
    means = [one.accuracy for one in side.held_out]
    axes.plot(x_values, means, color=colour, marker="o", markersize=3, label=side.name)
    low = [one.accuracy - one.standard_error for one in side.held_out]
    high = [one.accuracy + one.standard_error for one in side.held_out]
    axes.fill_between(x_values, low, high, color=colour, alpha=0.12, linewidth=0)


if __name__ == "__main__":
    sys.exit(report_errors(main))
