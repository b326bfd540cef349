"""Whole training steps of a recipe, and of TRL's GRPOTrainer(loss_type="dapo") on the same task.

TRL is the one rival that starts on a CPU. Both get the recipe's model, prompts in its order, rule,
sizes and optimizer, and train on every answer they sample. They take turns, step by step, so that
a slow minute hits both; whoever does not have the turn waits without computing.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from megadapo.config import RunConfig, to_dict
from megadapo.data.prompts import Prompt
from megadapo.lab.bench.step_rival import Rival, rival_settings
from megadapo.lab.bench.step_settings import StepTime
from megadapo.observe.machine import inspect_machine
from megadapo.observe.metrics.records import MetricRecord

OVERRIDES = (
    "evaluation.every=0",
    "checkpoint.every=1000000",
    'sampling.selection="all"',
    "reward.symbolic=false",
    "sampling.journal=false",
)
"""What the rival's step does not have is off, and every answer that is sampled is trained on."""

SECTIONS = ("model", "data", "reward", "rollout", "sampling", "algorithm", "trainer")
"""Of the configuration, what decides a measurement."""
NOT_MEASURED = ("prompts", "model", "folder")
"""Of the rival's settings, what the configuration says already, and where it was."""


class Contender(Protocol):
    """One side: takes a step when it is told to."""

    def step(self) -> StepTime: ...


@dataclass(frozen=True, kw_only=True)
class Side:
    """What one side measured, warm-up left out."""

    name: str
    steps: list[StepTime]

    @property
    def answers_per_s(self) -> float:
        """Answers trained on in a second of whole steps, at the median step."""
        return 1.0 / float(statistics.median(one.seconds / one.num_answers for one in self.steps))

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens sampled and trained on in a second, over all steps."""
        return sum(s.num_tokens for s in self.steps) / sum(s.seconds for s in self.steps)

    def median(self, name: str) -> float:
        return float(statistics.median(getattr(one, name) for one in self.steps))


class Ours:
    """The loop of `megadapo train`, one step at a time."""

    def __init__(self, records: Iterator[MetricRecord], config: RunConfig) -> None:
        """`records`: of the run, each of which is a step when it is asked for."""
        self._records = records
        self._num_answers = config.sampling.responses_per_prompt

    def step(self) -> StepTime:
        begun = time.perf_counter()
        record = next(self._records)
        return StepTime(
            seconds=time.perf_counter() - begun,
            rollout_s=_number(record["time/rollout_s"]),
            num_answers=int(_number(record["groups/kept"])) * self._num_answers,
            num_tokens=int(_number(record["tokens/trained"])),
            accuracy=_number(record["accuracy/mean"]),
        )


def compare(
    config: RunConfig,
    records: Iterator[MetricRecord],
    prompts: list[Prompt],
    *,
    trl_python: Path,
    trl_arguments: Mapping[str, Any],
    warmup: int,
    num_steps: int,
    json_file: Path | None,
) -> None:
    """Take the run's steps in turn with the rival's, print a table, and write it down if asked to.

    Args:
        config: read with OVERRIDES; of more than `num_steps` steps, as the last one also saves.
        records: of our run, which takes a step whenever one is asked for.
        trl_arguments: more of GRPOConfig's own settings.
        warmup: of the `num_steps` steps, those that do not count.

    Raises:
        InfraError: TRL's environment does not work, or TRL ended.
    """
    folder = config.run.folder / "trl"
    folder.mkdir(parents=True)
    settings = rival_settings(config, prompts, folder, trl_arguments)
    with closing(Rival(trl_python, settings, folder / "log.txt")) as rival:
        steps = in_turn(Ours(records, config), rival, num_steps)[warmup:]
    ours = Side(name="megadapo", steps=[own for own, _ in steps])
    theirs = Side(name=f"TRL {rival.version}", steps=[other for _, other in steps])
    print(table(ours, theirs))
    if json_file is not None:
        record = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": machine(),
            "ratio": ours.answers_per_s / theirs.answers_per_s,
            "sides": [
                {**summary(side), "steps": [asdict(s) for s in side.steps]}
                for side in (ours, theirs)
            ],
            "warmup": warmup,
            "ours": {name: to_dict(config)[name] for name in SECTIONS},
            "theirs": {k: v for k, v in asdict(settings).items() if k not in NOT_MEASURED},
        }
        json_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def in_turn(ours: Contender, rival: Contender, num_steps: int) -> list[tuple[StepTime, StepTime]]:
    """As many steps of each; who comes first changes every time."""
    taken = []
    for number in range(num_steps):
        if number % 2:
            theirs, own = rival.step(), ours.step()
        else:
            own, theirs = ours.step(), rival.step()
        taken.append((own, theirs))
    return taken


def summary(side: Side) -> dict[str, Any]:
    """One side's numbers."""
    return {
        "name": side.name,
        "seconds_per_step": side.median("seconds"),
        "rollout_seconds": side.median("rollout_s"),
        "answers_per_s": side.answers_per_s,
        "tokens_per_s": side.tokens_per_s,
        "tokens_per_answer": sum(s.num_tokens for s in side.steps)
        / sum(s.num_answers for s in side.steps),
        "accuracy": side.steps[-1].accuracy,
    }


def table(ours: Side, theirs: Side) -> str:
    """Both sides as text, and the ratio of their answers per second."""
    head = f"{'':14}{'s a step':>10}{'rollout':>10}{'answers/s':>11}{'tokens/s':>10}{'length':>8}"
    lines = [f"{head}{'accuracy':>10}   medians of {len(ours.steps)} steps"]
    for side in (ours, theirs):
        values = summary(side)
        lines.append(
            f"{side.name:14}{values['seconds_per_step']:10.3f}{values['rollout_seconds']:10.3f}"
            f"{values['answers_per_s']:11.1f}{values['tokens_per_s']:10.0f}"
            f"{values['tokens_per_answer']:8.1f}{values['accuracy']:10.3f}"
        )
    ratio = ours.answers_per_s / theirs.answers_per_s
    lines.append(f"{ours.name} trains on {ratio:.2f} x the answers a second of {theirs.name}")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What it was measured on, and with which versions."""
    found = inspect_machine()
    return {
        "cpu": _cpu_name(),
        "cores": found.num_cores,
        "system": found.system,
        "python": found.python,
        "versions": {name: version for name, version in found.packages.items() if version},
    }


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # only Linux has it
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), None)


def _number(value: float | None) -> float:
    assert value is not None, "a step that was sampled has it"
    return value
