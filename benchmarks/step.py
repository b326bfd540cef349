"""Time of whole training steps, alternating with those of TRL's GRPOTrainer(loss_type="dapo").

TRL is the only baseline that starts on a CPU. Both sides get the recipe's model, prompts in its
order as token ids, rule, sizes and optimizer. They alternate step by step, so that a slow minute
affects both; the waiting side does not compute.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from baselines.trl_baseline import (
    HeldOut,
    StepTime,
    TrlBaseline,
    trl_argument,
    trl_python,
    trl_settings,
)
from shared import add_numbers, script_parser, training_records, write_results

from megadapo.cli import parse, report_errors
from megadapo.commands.common import load_checked
from megadapo.config import RunConfig, to_dict
from megadapo.observe.metrics.records import MetricRecord, read_evaluations
from megadapo.observe.tables import TextTable
from megadapo.rollout.episodes.requests import EpisodeRequests
from megadapo.rollout.sampling.evaluation import HeldOutRequests
from megadapo.run.inputs import RunPrompts, load_tokenizer

OVERRIDES = ("checkpoint.every=1000000", "reward.symbolic=off")
"""Overrides that turn off what TRL's step does not have."""
SPEED_ALONE = ("evaluation.every=0", 'sampling.selection="all"')
"""Further overrides, with which both sides train on every sampled answer."""

SECTIONS = ("model", "data", "reward", "rollout", "sampling", "algorithm", "trainer", "evaluation")
"""Sections of the configuration in the JSON file."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side's run."""

    name: str
    steps: list[StepTime]
    held_out: list[HeldOut]
    """Evaluations, the first of them before training; empty without an accuracy to reach."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both sides' runs with the same seed, and the settings of each as JSON values."""

    sides: tuple[Side, Side]
    """Ours and TRL's."""
    settings: dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the speed of both sides, and write JSON if requested."""
    arguments = parse(step_parser(__doc__), argv)
    load_checked(arguments)
    comparison = compare(arguments, SPEED_ALONE)
    sides = [summary(side, arguments.warmup) for side in comparison.sides]
    print(table(*sides))
    ratio = sides[0]["answers_per_s"] / sides[1]["answers_per_s"]
    record = {"ratio": ratio, "sides": sides, "warmup": arguments.warmup, **comparison.settings}
    write_results(arguments.json, record)
    return 0


def step_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a script that trains beside TRL."""
    parser = script_parser(doc, num_steps=16)
    parser.add_argument(
        "--trl-python",
        type=trl_python,
        required=True,
        metavar="PATH",
        help="Python of an environment with TRL; benchmarks/README.md installs one",
    )
    parser.add_argument(
        "--trl",
        type=trl_argument,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of TRL's GRPOConfig, its value as JSON or bare text; repeatable",
    )
    # the first step is slower
    add_numbers(parser, [("warmup", 4, "steps before the measured ones")])
    return parser


def compare(
    arguments: argparse.Namespace, overrides: Sequence[str], seed: int | None = None
) -> Comparison:
    """Train both sides with a seed, the recipe's if None."""
    # one step more than both take, as the last one saves
    num_steps = arguments.warmup + arguments.steps + 1
    keys = (*OVERRIDES, *overrides)
    with training_records(arguments, num_steps, keys, seed) as (config, records):
        return _take_turns(config, records, arguments)


def _take_turns(
    config: RunConfig, records: Iterable[MetricRecord], arguments: argparse.Namespace
) -> Comparison:
    """Alternate the run's steps with TRL's; evaluate both as often as the recipe says."""
    folder = config.run.folder / "trl"
    folder.mkdir(parents=True)
    prompts = RunPrompts.load(config, load_tokenizer(config), further=())
    every, held_out = config.evaluation.every, None
    if every:
        held_out = HeldOutRequests.create(
            prompts.held_out,
            config.evaluation,
            EpisodeRequests(tokenizer=prompts.tokenizer, seed=config.run.seed),
            max_response_tokens=config.rollout.max_response_tokens,
        )
    settings = trl_settings(config, prompts, held_out, folder, dict(arguments.trl))
    found: list[HeldOut] = []
    with closing(TrlBaseline(arguments.trl_python, settings, folder)) as baseline:
        own = _our_steps(records, config.sampling.responses_per_prompt)
        other = _their_steps(baseline, held_out, every, found)
        steps = alternate(own, other, config.run.num_steps - 1)
    ours = [
        HeldOut(one.step, one.mean, one.standard_error, one.response_length)
        for one in read_evaluations(config.run.folder)
    ]
    return Comparison(
        sides=(
            Side(name="megadapo", steps=[one for one, _ in steps], held_out=ours),
            Side(name=f"TRL {baseline.version}", steps=[one for _, one in steps], held_out=found),
        ),
        settings={
            "ours": {name: to_dict(config)[name] for name in SECTIONS},
            "theirs": {
                "grpo": settings["grpo"],
                "reward": settings["reward"],
                "stop_ids": baseline.stop_ids,
            },
        },
    )


def _our_steps(records: Iterable[MetricRecord], responses_per_prompt: int) -> Iterator[StepTime]:
    start = None
    for record in records:
        # before the first step the processes start
        seconds = _number(record["time/step_s"])
        if start is not None:
            seconds = time.perf_counter() - start - _number(record["time/evaluate_s"])
        yield StepTime(
            seconds=seconds,
            rollout_s=_number(record["time/rollout_s"]),
            num_answers=int(_number(record["groups/kept"])) * responses_per_prompt,
            num_sampled=int(_number(record["groups/sampled"])) * responses_per_prompt,
            num_tokens=int(_number(record["tokens/trained"])),
            accuracy=_number(record["accuracy/mean"]),
        )
        start = time.perf_counter()


def _their_steps(
    baseline: TrlBaseline, held_out: HeldOutRequests | None, every: int, found: list[HeldOut]
) -> Iterator[StepTime]:
    """Yield TRL's steps, and show them; add its evaluations to `found`."""

    def evaluate(step: int) -> None:
        if held_out is not None and step % every == 0:
            one = baseline.evaluate(step, held_out)
            print(f"TRL evaluation step={step} accuracy={one.accuracy:.4f}", flush=True)
            found.append(one)

    evaluate(0)
    for step in itertools.count(1):
        done = baseline.step()
        times = f"rollout_s={done.rollout_s:.2f} step_s={done.seconds:.2f}"
        print(f"TRL step={step} accuracy={done.accuracy:.4f} {times}", flush=True)
        evaluate(step)
        yield done


def alternate(
    ours: Iterator[StepTime], theirs: Iterator[StepTime], num_steps: int
) -> list[tuple[StepTime, StepTime]]:
    """Take `num_steps` steps of each side; the first side of a pair changes every time."""
    pairs = []
    for number in range(num_steps):
        if number % 2:
            other, own = next(theirs), next(ours)
        else:
            own, other = next(ours), next(theirs)
        pairs.append((own, other))
    return pairs


def summary(side: Side, warmup: int) -> dict[str, Any]:
    """Return a side's steps without warm-up, and its medians, as JSON values."""
    steps = side.steps[warmup:]
    num_tokens = sum(one.num_tokens for one in steps)
    return {
        "name": side.name,
        "seconds_per_step": statistics.median(one.seconds for one in steps),
        "rollout_seconds": statistics.median(one.rollout_s for one in steps),
        "answers_per_s": 1.0 / statistics.median(one.seconds / one.num_answers for one in steps),
        "tokens_per_s": num_tokens / sum(one.seconds for one in steps),
        "tokens_per_answer": num_tokens / sum(one.num_answers for one in steps),
        "accuracy": steps[-1].accuracy,
        "steps": [asdict(one) for one in steps],
    }


def table(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Format both sides, and the ratio of their answers per second."""
    ratio = ours["answers_per_s"] / theirs["answers_per_s"]
    columns = {
        "s a step": ("seconds_per_step", ".3f"),
        "rollout": ("rollout_seconds", ".3f"),
        "answers/s": ("answers_per_s", ".1f"),
        "tokens/s": ("tokens_per_s", ".0f"),
        "length": ("tokens_per_answer", ".1f"),
        "accuracy": ("accuracy", ".3f"),
    }
    return TextTable(
        title=f"medians of {len(ours['steps'])} steps",
        note=f"{ours['name']} trains on {ratio:.2f} x the answers per second of {theirs['name']}",
        head=["", *columns],
        rows=[
            [side["name"], *(format(side[key], form) for key, form in columns.values())]
            for side in (ours, theirs)
        ],
    ).text()


def _number(value: float | None) -> float:
    assert value is not None, "every sampled step has it"
    return value


if __name__ == "__main__":
    sys.exit(report_errors(main))
