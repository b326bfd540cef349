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
from functools import partial
from pathlib import Path
from typing import Any

import megadapo
from megadapo.config import RunConfig, to_dict
from megadapo.data.prompts import Prompt, PromptStream
from megadapo.errors import ConfigError, InfraError
from megadapo.lab.record import write_record
from megadapo.models.folder import path_from_anywhere
from megadapo.observe.metrics.records import MetricRecord
from megadapo.observe.tables import TextTable
from megadapo.trainer.config import ADAM_EPS

OVERRIDES = (
    "evaluation.every=0",
    "checkpoint.every=1000000",
    'sampling.selection="all"',
    "reward.symbolic=false",
)
"""Overrides that turn off what TRL's step does not have, and train on every sampled answer."""

SECTIONS = ("model", "data", "reward", "rollout", "sampling", "algorithm", "trainer")
"""Sections of the configuration in the JSON file."""

FIXED = {
    "loss_type": "dapo",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "model_init_kwargs": {"dtype": "float32"},
    "optim": "adamw_torch_fused",
    "gradient_accumulation_steps": 1,
    "num_iterations": 1,
    "top_p": 1.0,
    "beta": 0.0,
    "lr_scheduler_type": "constant_with_warmup",
    "shuffle_dataset": False,
    "dataloader_num_workers": 0,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "log_completions": False,
}
"""Arguments of GRPOConfig for every recipe: ours, without options that only cost time."""

WORKER = "megadapo.lab.bench.trl_worker"
INSTALL_TRL = """\
TRL needs its own environment, without megadapo and without CUDA packages:
    python -m venv trl-env
    trl-env/bin/pip install --no-deps torch==2.13.0     # the CPU build
    trl-env/bin/pip install trl==1.16.0 transformers==5.19.0
then: megadapo bench step CONFIG --trl-python trl-env/bin/python"""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One whole step of one side: rollout, scoring, updates, and new weights for the next step."""

    seconds: float
    rollout_s: float
    """Time before the first update; it includes TRL's old log-probs, but not ours."""
    num_answers: int
    """Answers trained on."""
    num_tokens: int
    """Number of generated tokens."""
    accuracy: float


class TrlBaseline:
    """TRL in a process with its own environment."""

    def __init__(self, python: Path, settings: dict[str, Any], folder: Path) -> None:
        """Start TRL in an empty folder with the settings that `trl_settings` returns."""
        self._log_file = folder / "log.txt"
        settings_file = folder / "settings.json"
        settings_file.write_text(json.dumps(settings), encoding="utf-8")
        # of our environment the process sees only this package
        (folder / "path").mkdir()
        (folder / "path" / "megadapo").symlink_to(Path(megadapo.__file__).parent)
        environment = os.environ | {
            "PYTHONPATH": str(folder / "path"),
            "OMP_NUM_THREADS": str(settings["num_threads"]),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with self._log_file.open("wb") as log:
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
    folder = config.run.folder / "trl"
    folder.mkdir(parents=True)
    settings = trl_settings(config, prompts, folder, trl_arguments)
    with closing(TrlBaseline(trl_python, settings, folder)) as baseline:
        our_step = partial(_our_step, records, config.sampling.responses_per_prompt)
        steps = alternate(our_step, baseline.step, num_steps)[warmup:]
    sides = [
        summary("megadapo", [own for own, _ in steps]),
        summary(f"TRL {baseline.version}", [other for _, other in steps]),
    ]
    print(table(*sides))
    if json_file is not None:
        record = {
            "ratio": sides[0]["answers_per_s"] / sides[1]["answers_per_s"],
            "sides": sides,
            "warmup": warmup,
            "ours": {name: to_dict(config)[name] for name in SECTIONS},
            "theirs": {"grpo": settings["grpo"], "reward": settings["reward"]},
        }
        write_record(json_file, record)


def _our_step(records: Iterator[MetricRecord], responses_per_prompt: int) -> StepTime:
    start = time.perf_counter()
    record = next(records)
    return StepTime(
        seconds=time.perf_counter() - start,
        rollout_s=_number(record["time/rollout_s"]),
        num_answers=int(_number(record["groups/kept"])) * responses_per_prompt,
        num_tokens=int(_number(record["tokens/trained"])),
        accuracy=_number(record["accuracy/mean"]),
    )


def summary(name: str, steps: list[StepTime]) -> dict[str, Any]:
    """Return a side's steps without warm-up, and its medians, as JSON values."""
    num_tokens = sum(one.num_tokens for one in steps)
    return {
        "name": name,
        "seconds_per_step": statistics.median(one.seconds for one in steps),
        "rollout_seconds": statistics.median(one.rollout_s for one in steps),
        "answers_per_s": 1.0 / statistics.median(one.seconds / one.num_answers for one in steps),
        "tokens_per_s": num_tokens / sum(one.seconds for one in steps),
        "tokens_per_answer": num_tokens / sum(one.num_answers for one in steps),
        "accuracy": steps[-1].accuracy,
        "steps": [asdict(one) for one in steps],
    }


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
) -> dict[str, Any]:
    """Return the recipe's step for TRL as JSON values.

    "grpo" has the arguments of GRPOConfig, "prompts" the messages and gold answers of all steps in
    the recipe's order.
    """
    algorithm, optimizer, sampling = config.algorithm, config.trainer.optimizer, config.sampling
    stream = PromptStream(prompts, config.run.seed, shuffle=config.data.shuffle)
    used = [stream.at(i) for i in range(config.run.num_steps * sampling.prompts_per_step)]
    num_answers = sampling.prompts_per_step * sampling.responses_per_prompt
    updates_per_step = num_answers // algorithm.responses_per_mini_batch
    grpo = {
        "output_dir": str(folder),
        "per_device_train_batch_size": algorithm.responses_per_mini_batch,
        "steps_per_generation": updates_per_step,
        "num_generations": sampling.responses_per_prompt,
        "max_steps": config.run.num_steps * updates_per_step,
        "max_completion_length": config.rollout.max_response_tokens,
        "temperature": config.rollout.temperature,
        "epsilon": algorithm.objective.clip_low,
        "epsilon_high": algorithm.objective.clip_high,
        "learning_rate": optimizer.lr,
        "warmup_steps": optimizer.warmup_steps * updates_per_step,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": ADAM_EPS,
        "max_grad_norm": optimizer.grad_clip,
        "seed": config.run.seed,
    }
    return {
        "model": path_from_anywhere(config.model.path),
        "prompts": [(prompt.messages, prompt.ground_truth) for prompt in used],
        "reward": {
            "rule": config.reward.rule,
            "pattern": config.reward.pattern,
            "max_length": config.rollout.max_response_tokens,
            "buffer": algorithm.overlong_buffer,
            "factor": algorithm.overlong_factor,
        },
        "updates_per_step": updates_per_step,
        "num_threads": os.cpu_count() or 1,
        "grpo": {**FIXED, **grpo, **trl_arguments},
    }


def _number(value: float | None) -> float:
    assert value is not None, "every sampled step has it"
    return value
