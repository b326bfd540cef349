"""TRL's GRPOTrainer(loss_type="dapo") in a process of its own, with a recipe's task and settings.

The process has its own environment, without megadapo's dependencies. It takes one step, or
evaluates the held-out problems, per request.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import megadapo
from megadapo.cluster.processes import cpu_environment
from megadapo.config import RunConfig
from megadapo.data.prompts import render
from megadapo.errors import ConfigError, InfraError
from megadapo.models.folder import path_from_anywhere
from megadapo.rollout.sampling.evaluation import HeldOutRequests
from megadapo.run.inputs import RunPrompts
from megadapo.trainer.config import ADAM_EPS

FIXED = {
    "loss_type": "dapo",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "model_init_kwargs": {"dtype": "float32"},
    "optim": "adamw_torch_fused",
    "num_iterations": 1,
    "top_p": 1.0,
    "beta": 0.0,
    "shuffle_dataset": False,
    "dataloader_num_workers": 0,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "log_completions": False,
}
"""Arguments of GRPOConfig for every recipe: ours, without options that only cost time."""

WORKER = Path(__file__).with_name("trl_worker.py")
INSTALL_TRL = """\
TRL needs its own environment, without megadapo and without CUDA packages:
    python -m venv trl-env
    trl-env/bin/pip install --no-deps torch==2.13.0     # the CPU build
    trl-env/bin/pip install trl==1.16.0 transformers==5.19.0
then: python benchmarks/step.py CONFIG --trl-python trl-env/bin/python"""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One whole step of one side: rollout, scoring, updates, and new weights for the next step."""

    seconds: float
    rollout_s: float
    """Time before the first update; it includes TRL's old log-probs, but not ours."""
    num_answers: int
    """Answers trained on."""
    num_sampled: int
    """Sampled answers: more than are trained on where dynamic sampling drops groups."""
    num_tokens: int
    """Number of tokens trained on."""
    accuracy: float


class HeldOut(NamedTuple):
    """One evaluation on the held-out problems."""

    step: int
    """Finished steps; 0 is before training."""
    accuracy: float
    standard_error: float
    response_length: float
    """Mean response length in tokens."""


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
        # the OpenMP and the allocator's settings of our trainer, which are faster for TRL too
        environment = os.environ | cpu_environment(settings["num_threads"])
        environment |= {
            "PYTHONPATH": str(folder / "path"),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [str(python), str(WORKER), str(settings_file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        ready = self._reply()
        self.version = str(ready["version"])
        self.stop_ids: list[int] = ready["stop_ids"]
        """Token ids that end a response."""

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def step(self) -> StepTime:
        """Take one step with all of its updates."""
        return StepTime(**self._ask("step"))

    def evaluate(self, step: int, held_out: HeldOutRequests) -> HeldOut:
        """Evaluate the present weights on the problems that the settings are of."""
        results = self._ask("evaluate")["results"]
        of_sets = defaultdict(list)
        for name, one in zip(held_out.set_names, results, strict=True):
            of_sets[name].append((one["num_correct"] / one["num_scored"], one["num_tokens"]))
        sets = [np.array(own) for own in of_sets.values()]
        accuracy, length = np.mean([own.mean(axis=0) for own in sets], axis=0)
        errors = [own[:, 0].std(ddof=1) / math.sqrt(len(own)) for own in sets]
        error = math.hypot(*errors) / len(sets)
        return HeldOut(step, accuracy, error, length / held_out.samples_per_problem)

    def _ask(self, request: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            print(request, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None
        return self._reply()

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


def trl_python(text: str) -> Path:
    """Return the absolute path of TRL's interpreter, an option's value.

    Raises:
        ConfigError: it is missing or has no TRL; the error says how to install it.
    """
    python = Path(text)
    if not python.is_file():
        raise ConfigError(f"--trl-python {python}: not found. {INSTALL_TRL}")
    # not resolved: the place of the link makes it an environment
    python = python.absolute()
    probe = subprocess.run([str(python), "-c", "import trl, torch"], capture_output=True, text=True)
    if probe.returncode != 0:
        reason = probe.stderr.strip().splitlines()[-1:]
        raise ConfigError(f"--trl-python {python}: {' '.join(reason)}. {INSTALL_TRL}")
    return python


def trl_argument(text: str) -> tuple[str, Any]:
    """Return name and value of a `NAME=VALUE` option; the value is JSON or bare text."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text}: must be NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def trl_settings(
    config: RunConfig,
    prompts: RunPrompts,
    held_out: HeldOutRequests | None,
    folder: Path,
    trl_arguments: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the recipe's task and settings for TRL as JSON values.

    "grpo" has the arguments of GRPOConfig, "prompts" the token ids and gold answers of all steps in
    the recipe's order.

    Raises:
        ConfigError: TRL cannot do the same, or `trl_arguments` do not fit the recipe.
    """
    if not config.reward.is_rule_alone:
        raise ConfigError("reward.functions: TRL's side of the benchmark has reward.rule alone")
    sampling, limit = config.sampling, config.rollout.max_response_tokens
    stream, tokenizer = prompts.stream(config), prompts.tokenizer
    used = [stream.at(index) for index in range(config.run.num_steps * sampling.prompts_per_step)]
    optimizer = config.trainer.optimizer
    rates = [optimizer.lr_at(step) for step in range(1, config.run.num_steps + 1)]
    problems = [] if held_out is None else zip(held_out.requests, held_out.prompts, strict=True)
    return {
        "model": path_from_anywhere(config.model.path),
        "prompts": [(render(prompt, tokenizer), prompt.ground_truth) for prompt in used],
        "held_out": {
            "prompts": [(list(one.prompt_ids), prompt.ground_truth) for one, prompt in problems],
            "num_samples": config.evaluation.samples_per_problem,
            "temperature": config.evaluation.temperature,
            "top_p": config.evaluation.top_p,
            "seed": config.run.seed,
        },
        "reward": {
            "rule": config.reward.rule,
            "pattern": config.reward.pattern,
            "max_length": limit,
            "buffer": config.algorithm.overlong_buffer,
            "factor": config.algorithm.overlong_factor,
        },
        "responses_per_step": sampling.prompts_per_step * sampling.responses_per_prompt,
        "updates_per_step": _updates_per_step(config),
        "rate_factors": [rate / optimizer.lr if optimizer.lr else 1.0 for rate in rates],
        "num_threads": len(os.sched_getaffinity(0)),
        "grpo": {**_arguments(config, folder, trl_arguments), **trl_arguments},
    }


def _updates_per_step(config: RunConfig) -> int:
    sampling = config.sampling
    num_answers = sampling.prompts_per_step * sampling.responses_per_prompt
    return num_answers // config.algorithm.responses_per_mini_batch


def _arguments(
    config: RunConfig, folder: Path, trl_arguments: Mapping[str, Any]
) -> dict[str, object]:
    """Return the arguments of GRPOConfig; `gradient_accumulation_steps` cuts an update's batch."""
    algorithm, optimizer = config.algorithm, config.trainer.optimizer
    updates_per_step = _updates_per_step(config)
    num_parts = trl_arguments.get("gradient_accumulation_steps", 1)
    if not isinstance(num_parts, int) or algorithm.responses_per_mini_batch % num_parts:
        raise ConfigError(
            f"--trl gradient_accumulation_steps={num_parts} does not divide "
            f"algorithm.responses_per_mini_batch = {algorithm.responses_per_mini_batch}"
        )
    return {
        **FIXED,
        "output_dir": str(folder),
        "per_device_train_batch_size": algorithm.responses_per_mini_batch // num_parts,
        "gradient_accumulation_steps": num_parts,
        "steps_per_generation": updates_per_step * num_parts,
        "num_generations": config.sampling.responses_per_prompt,
        "max_steps": config.run.num_steps * updates_per_step,
        "max_completion_length": config.rollout.max_response_tokens,
        "temperature": config.rollout.temperature,
        "epsilon": algorithm.objective.clip_low,
        "epsilon_high": algorithm.objective.clip_high,
        "learning_rate": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": ADAM_EPS,
        "max_grad_norm": optimizer.grad_clip,
        "seed": config.run.seed,
    }
