"""Benchmark of whole training steps against TRL's GRPOTrainer(loss_type="dapo") on the same task.

TRL is the only baseline that starts on a CPU. Both sides get the recipe's model, prompts in its
order, rule, sizes and optimizer, and train on all sampled answers. They alternate step by step, so
that a slow minute affects both; the waiting side does not compute.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import megadapo
from megadapo.config import RunConfig, to_dict
from megadapo.data.prompts import Prompt, PromptStream
from megadapo.errors import ConfigError, InfraError
from megadapo.lab.bench.trl_settings import StepTime, TrlSettings
from megadapo.lab.record import write_record
from megadapo.models.folder import path_from_anywhere
from megadapo.observe.metrics.records import MetricRecord
from megadapo.trainer.config import ADAM_EPS

OVERRIDES = (
    "evaluation.every=0",
    "checkpoint.every=1000000",
    'sampling.selection="all"',
    "reward.symbolic=false",
    "sampling.journal=false",
)
"""Overrides that turn off what TRL's step does not have, and train on every sampled answer."""

SECTIONS = ("model", "data", "reward", "rollout", "sampling", "algorithm", "trainer")
"""Sections of the configuration in the JSON file."""
NOT_RECORDED = ("prompts", "model", "folder")
"""TRL settings that the configuration has already, or that do not matter."""

WORKER = "megadapo.lab.bench.trl_worker"
INSTALL_TRL = """\
TRL needs its own environment, without megadapo and without CUDA packages:
    python -m venv trl-env
    trl-env/bin/pip install --no-deps torch==2.13.0     # the CPU build
    trl-env/bin/pip install trl==1.16.0 transformers==5.19.0
then: megadapo bench step CONFIG --trl-python trl-env/bin/python"""


@dataclass(frozen=True, kw_only=True)
class Side:
    """Measurements of one side, without warm-up."""

    name: str
    steps: list[StepTime]

    @property
    def answers_per_s(self) -> float:
        """Answers trained on per second of whole steps, at the median step."""
        return 1.0 / float(statistics.median(one.seconds / one.num_answers for one in self.steps))

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens sampled and trained on per second, over all steps."""
        return sum(s.num_tokens for s in self.steps) / sum(s.seconds for s in self.steps)

    @property
    def summary(self) -> dict[str, Any]:
        """The numbers of the table."""
        num_tokens = sum(one.num_tokens for one in self.steps)
        return {
            "name": self.name,
            "seconds_per_step": float(statistics.median(one.seconds for one in self.steps)),
            "rollout_seconds": float(statistics.median(one.rollout_s for one in self.steps)),
            "answers_per_s": self.answers_per_s,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_answer": num_tokens / sum(one.num_answers for one in self.steps),
            "accuracy": self.steps[-1].accuracy,
        }


class TrlBaseline:
    """TRL in a process with its own environment."""

    def __init__(self, python: Path, settings: TrlSettings, log_file: Path) -> None:
        self._log_file = log_file
        folder = Path(settings.folder)
        settings_file = folder / "settings.json"
        settings_file.write_text(json.dumps(asdict(settings)), encoding="utf-8")
        # of our environment the process sees only this package
        (folder / "path").mkdir()
        (folder / "path" / "megadapo").symlink_to(Path(megadapo.__file__).parent)
        environment = os.environ | {
            "PYTHONPATH": str(folder / "path"),
            "OMP_NUM_THREADS": str(settings.num_threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", WORKER, str(settings_file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        self.version = str(self._reply()["ready"])

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def step(self) -> StepTime:
        """Take one step with all of its updates.

        Raises:
            InfraError: the process ended.
        """
        assert self._process.stdin is not None
        try:
            print("step", file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None
        return StepTime(**self._reply())

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _ended(self) -> InfraError:
        self.close()
        log = self._log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        last = "\n".join(log[-5:])
        return InfraError(f"TRL ended with status {self._process.returncode}:\n{last}")


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
    """Alternate the run's steps with TRL's, print a table, and write JSON if requested.

    Args:
        config: configuration with OVERRIDES and more than `num_steps` steps, as the last one saves.
        records: records of our run, which takes one step per record.
        trl_arguments: additional settings of GRPOConfig.
        warmup: number of first steps that do not count.

    Raises:
        InfraError: TRL's environment does not work, or TRL ended.
    """

    def step() -> StepTime:
        start = time.perf_counter()
        record = next(records)
        num_groups = int(_number(record["groups/kept"]))
        return StepTime(
            seconds=time.perf_counter() - start,
            rollout_s=_number(record["time/rollout_s"]),
            num_answers=num_groups * config.sampling.responses_per_prompt,
            num_tokens=int(_number(record["tokens/trained"])),
            accuracy=_number(record["accuracy/mean"]),
        )

    folder = config.run.folder / "trl"
    folder.mkdir(parents=True)
    settings = trl_settings(config, prompts, folder, trl_arguments)
    with closing(TrlBaseline(trl_python, settings, folder / "log.txt")) as baseline:
        steps = alternate(step, baseline.step, num_steps)[warmup:]
    ours = Side(name="megadapo", steps=[own for own, _ in steps])
    theirs = Side(name=f"TRL {baseline.version}", steps=[other for _, other in steps])
    print(table(ours, theirs))
    if json_file is not None:
        conditions = {
            "warmup": warmup,
            "ours": {name: to_dict(config)[name] for name in SECTIONS},
            "theirs": {k: v for k, v in asdict(settings).items() if k not in NOT_RECORDED},
        }
        write_record(json_file, comparison(ours, theirs) | conditions)


def comparison(ours: Side, theirs: Side) -> dict[str, Any]:
    """Return the measurements of both sides as JSON values."""
    sides = [
        {**side.summary, "steps": [asdict(step) for step in side.steps]} for side in (ours, theirs)
    ]
    return {"ratio": ours.answers_per_s / theirs.answers_per_s, "sides": sides}


def alternate(
    ours: Callable[[], StepTime], theirs: Callable[[], StepTime], num_steps: int
) -> list[tuple[StepTime, StepTime]]:
    """Take `num_steps` steps of each side; the first side of a pair changes every time."""
    pairs = []
    for number in range(num_steps):
        if number % 2:
            other, own = theirs(), ours()
        else:
            own, other = ours(), theirs()
        pairs.append((own, other))
    return pairs


def table(ours: Side, theirs: Side) -> str:
    """Format both sides, and the ratio of their answers per second."""
    head = f"{'':14}{'s a step':>10}{'rollout':>10}{'answers/s':>11}{'tokens/s':>10}{'length':>8}"
    lines = [f"{head}{'accuracy':>10}   medians of {len(ours.steps)} steps"]
    for side in (ours, theirs):
        values = side.summary
        lines.append(
            f"{side.name:14}{values['seconds_per_step']:10.3f}{values['rollout_seconds']:10.3f}"
            f"{values['answers_per_s']:11.1f}{values['tokens_per_s']:10.0f}"
            f"{values['tokens_per_answer']:8.1f}{values['accuracy']:10.3f}"
        )
    ratio = ours.answers_per_s / theirs.answers_per_s
    lines.append(f"{ours.name} trains on {ratio:.2f} x the answers per second of {theirs.name}")
    return "\n".join(lines)


def check_python(python: Path | None) -> Path:
    """Return the absolute path of TRL's interpreter.

    Raises:
        ConfigError: it is missing or has no TRL; the error says how to install it.
    """
    if python is None:
        raise ConfigError(f"no --trl-python is given. {INSTALL_TRL}")
    if not python.is_file():
        raise ConfigError(f"--trl-python {python}: not found. {INSTALL_TRL}")
    # not resolved: the place of the link makes it an environment
    python = python.absolute()
    probe = subprocess.run([str(python), "-c", "import trl, torch"], capture_output=True, text=True)
    if probe.returncode != 0:
        reason = probe.stderr.strip().splitlines()[-1:]
        raise ConfigError(f"--trl-python {python}: {' '.join(reason)}. {INSTALL_TRL}")
    return python


def parse_arguments(texts: Iterable[str]) -> dict[str, Any]:
    """Parse `NAME=VALUE` texts; a value is JSON or bare text.

    Raises:
        ConfigError: a text has no value.
    """
    parsed: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ConfigError(f"--trl {text}: must be NAME=VALUE")
        try:
            parsed[name] = json.loads(value)
        except ValueError:
            parsed[name] = value
    return parsed


def trl_settings(
    config: RunConfig, prompts: list[Prompt], folder: Path, trl_arguments: Mapping[str, Any]
) -> TrlSettings:
    """Return the recipe's step for TRL, with the prompts of all steps in the recipe's order."""
    algorithm, optimizer, sampling = config.algorithm, config.trainer.optimizer, config.sampling
    stream = PromptStream(prompts, config.run.seed, shuffle=config.data.shuffle)
    used = [stream.at(i) for i in range(config.run.num_steps * sampling.prompts_per_step)]
    num_answers = sampling.prompts_per_step * sampling.responses_per_prompt
    return TrlSettings(
        model=path_from_anywhere(config.model.path),
        folder=str(folder),
        prompts=[(list(prompt.messages), prompt.ground_truth) for prompt in used],
        rule=config.reward.rule,
        responses_per_prompt=sampling.responses_per_prompt,
        responses_per_mini_batch=algorithm.responses_per_mini_batch,
        updates_per_step=num_answers // algorithm.responses_per_mini_batch,
        max_steps=config.run.num_steps,
        max_response_tokens=config.rollout.max_response_tokens,
        overlong_buffer=algorithm.overlong_buffer,
        overlong_factor=algorithm.overlong_factor,
        temperature=config.rollout.temperature,
        top_p=1.0,
        clip_low=algorithm.objective.clip_low,
        clip_high=algorithm.objective.clip_high,
        lr=optimizer.lr,
        warmup_steps=optimizer.warmup_steps,
        weight_decay=optimizer.weight_decay,
        betas=optimizer.betas,
        eps=ADAM_EPS,
        grad_clip=optimizer.grad_clip,
        seed=config.run.seed,
        num_threads=os.cpu_count() or 1,
        trl_arguments=dict(trl_arguments),
    )


def _number(value: float | None) -> float:
    assert value is not None, "every sampled step has it"
    return value
