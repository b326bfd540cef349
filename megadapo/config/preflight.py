"""What can be found wrong with a run before any process starts: its files and the model's sizes.

Nothing is downloaded: what lies on the Hub is checked where it is cached, and reported otherwise.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from megadapo.config import RunConfig
from megadapo.data.arithmetic import SCHEME
from megadapo.data.sources import SUFFIXES, read_rows
from megadapo.errors import CheckpointError, ConfigError, DataError, MegadapoError
from megadapo.models.description import ModelDescription, describe_model
from megadapo.models.folder import cached_hub_folder, is_hub_name, read_hf_config
from megadapo.rollout.model_layout import validate_engine_layout
from megadapo.trainer.config import ModelConfig
from megadapo.trainer.model_layout import validate_model_layout

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


def check_run(config: RunConfig) -> list[str]:
    """Check what the configuration points at; return what could not be checked from here.

    Raises an error of the first problem's kind that lists all problems.
    """
    problems: list[MegadapoError] = []
    notes: list[str] = []
    for check in (_check_folder, _check_model, _check_data, _check_resume):
        try:
            notes += check(config)
        except MegadapoError as error:
            problems.append(error)
    if problems:
        raise type(problems[0])("\n".join(str(problem) for problem in problems))
    return notes


def _check_folder(config: RunConfig) -> list[str]:
    folder = config.run.folder.absolute()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigError(f"run.folder = {config.run.folder}: {nearest} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"run.folder = {config.run.folder}: {nearest} cannot be written to")
    return []


def _check_model(config: RunConfig) -> list[str]:
    folder = _model_folder(config.model)
    if folder is None:
        return [f"model.path = {config.model.path} is on the Hub and not checked"]
    model = describe_model(read_hf_config(folder))
    _check_layouts(model, config)
    if config.rollout.expert_parallel and not config.cluster.uses_cuda:
        # on the CPU vLLM's experts take every rank's numbers of experts for their own
        raise ConfigError("rollout.expert_parallel needs GPUs: turn it off on the CPU")
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if longest > model.max_positions:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_response_tokens = {longest} is above the "
            f"model's max_position_embeddings = {model.max_positions}"
        )
    return []


def _check_layouts(model: ModelDescription, config: RunConfig) -> None:
    """Trainer and engines must both be able to split the model; report the problems of both."""
    problems = []
    for check in (
        partial(validate_model_layout, model, config.trainer),
        partial(validate_engine_layout, model.shape, config.rollout),
    ):
        try:
            check()
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def _model_folder(model: ModelConfig) -> Path | None:
    """The folder with the model's config.json, or None where it is on the Hub only."""
    folder = Path(model.path)
    if folder.is_dir():
        _check_model_folder(model, folder)
        return folder
    if not is_hub_name(model.path):
        raise DataError(f"model.path = {model.path}: there is no such folder")
    return cached_hub_folder(model.path)


def _check_model_folder(model: ModelConfig, folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise DataError(f"model.path = {folder} has no config.json: not a Hugging Face model")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise DataError(f"model.path = {folder} has no tokenizer ({', '.join(_TOKENIZER_FILES)})")
    if model.init == "pretrained" and not any(folder.glob("*.safetensors")):
        raise DataError(
            f'model.path = {folder} has no *.safetensors; with model.init = "random" none are '
            "needed"
        )


def _check_data(config: RunConfig) -> list[str]:
    sources = {"data.train": config.data.train}
    if config.data.held_out is not None:
        sources["data.held_out"] = config.data.held_out
    problems, notes = [], []
    for key, source in sources.items():
        if not source.startswith(SCHEME) and _is_hub_dataset(source):
            notes.append(f"{key} = {source} is on the Hub and not checked")
            continue
        try:
            if next(read_rows(source), None) is None:
                problems.append(f"{key} = {source} holds no rows")
        except DataError as error:
            problems.append(f"{key}: {error}")
    if problems:
        raise DataError("\n".join(problems))
    return notes


def _check_resume(config: RunConfig) -> list[str]:
    resume = config.run.resume
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        raise CheckpointError(f"run.resume = {resume}: there is no such checkpoint folder")
    return []


def _is_hub_dataset(source: str) -> bool:
    path = Path(source).expanduser()
    if path.exists() or path.is_absolute() or source.startswith((".", "~")):
        return False
    name = "/".join(source.split("@")[0].split("/")[:2])
    return is_hub_name(name) and not name.endswith(SUFFIXES)
