"""TRL in an environment of its own: what it is told of a recipe, and its steps."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import megadapo
from megadapo.config import RunConfig
from megadapo.data.prompts import Prompt, PromptStream
from megadapo.errors import ConfigError, InfraError
from megadapo.lab.bench.step_settings import RivalSettings, StepTime
from megadapo.models.folder import path_from_anywhere

WORKER = "megadapo.lab.bench.step_trl"
HOW_TO_MAKE = """\
TRL wants an environment of its own, without megadapo and without CUDA's packages:
    python -m venv trl-env
    trl-env/bin/pip install --no-deps torch==2.13.0     # the CPU build
    trl-env/bin/pip install trl==1.16.0 transformers==5.19.0
then: megadapo bench step CONFIG --trl-python trl-env/bin/python"""


class Rival:
    """TRL in an environment of its own."""

    def __init__(self, python: Path, settings: RivalSettings, log_file: Path) -> None:
        self._log_file = log_file
        folder = Path(settings.folder)
        settings_file = folder / "settings.json"
        settings_file.write_text(json.dumps(asdict(settings)), encoding="utf-8")
        # of our environment it may see this package and nothing else
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
        """End it."""
        self._process.kill()
        self._process.wait()

    def step(self) -> StepTime:
        """One step of all updates.

        Raises:
            InfraError: it ended.
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


def check_python(python: Path | None) -> Path:
    """The rival's interpreter, absolute.

    Raises:
        ConfigError: there is none, or TRL is not in it; it says how to make one.
    """
    if python is None or not python.is_file():
        found = (
            "no --trl-python is given" if python is None else f"--trl-python {python}: not there"
        )
        raise ConfigError(f"{found}. {HOW_TO_MAKE}")
    # not resolved: the link's place is what makes it an environment
    python = python.absolute()
    probe = subprocess.run([str(python), "-c", "import trl, torch"], capture_output=True, text=True)
    if probe.returncode != 0:
        reason = probe.stderr.strip().splitlines()[-1:]
        raise ConfigError(f"--trl-python {python}: {' '.join(reason)}. {HOW_TO_MAKE}")
    return python


def parse_arguments(texts: Iterable[str]) -> dict[str, Any]:
    """`NAME=VALUE` texts as names and values.

    Raises:
        ConfigError: one has no value.
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


def rival_settings(
    config: RunConfig, prompts: list[Prompt], folder: Path, trl_arguments: Mapping[str, Any]
) -> RivalSettings:
    """The recipe's step for TRL, with the prompts of all its steps in the recipe's order."""
    algorithm, optimizer, sampling = config.algorithm, config.trainer.optimizer, config.sampling
    stream = PromptStream(prompts, config.run.seed, shuffle=config.data.shuffle)
    asked = [stream.at(i) for i in range(config.run.num_steps * sampling.prompts_per_step)]
    num_answers = sampling.prompts_per_step * sampling.responses_per_prompt
    return RivalSettings(
        model=path_from_anywhere(config.model.path),
        folder=str(folder),
        prompts=[(list(prompt.messages), prompt.ground_truth) for prompt in asked],
        rule=config.reward.rule,
        responses_per_prompt=sampling.responses_per_prompt,
        responses_per_mini_batch=algorithm.responses_per_mini_batch,
        updates_per_step=num_answers // algorithm.responses_per_mini_batch,
        max_steps=config.run.num_steps,
        max_response_tokens=config.rollout.max_response_tokens,
        overlong_buffer=algorithm.overlong_buffer,
        overlong_factor=algorithm.overlong_factor,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        clip_low=algorithm.objective.clip_low,
        clip_high=algorithm.objective.clip_high,
        lr=optimizer.lr,
        warmup_steps=optimizer.warmup_steps,
        weight_decay=optimizer.weight_decay,
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        eps=optimizer.eps,
        grad_clip=optimizer.grad_clip,
        seed=config.run.seed,
        num_threads=os.cpu_count() or 1,
        trl_arguments=dict(trl_arguments),
    )
