"""Checks of a teacher (`[algorithm.reference]`) before any process starts."""

from __future__ import annotations

from pathlib import Path

from megadapo.config.run_config import RunConfig
from megadapo.errors import ConfigError, DataError
from megadapo.models.description import describe_model
from megadapo.models.folder import read_hf_config
from megadapo.rewards.teacher import TeacherServer
from megadapo.tokens.tokenizer import read_tokenizer
from megadapo.trainer.model.model_layout import validate_teacher

PATH_KEY = "algorithm.reference.path"
RETRIES = 3


def check_teacher_folder(config: RunConfig, folder: Path, policy: Path) -> None:
    """Check that the folder's model can score the policy's tokens.

    Raises:
        ConfigError: its tokenizer, sizes or longest sequence do not fit.
        DataError: it lacks weights or a tokenizer.
    """
    if not any(folder.glob("*.safetensors")):
        raise DataError(f"{PATH_KEY} = {folder} has no *.safetensors: not a teacher's folder")
    teacher = describe_model(read_hf_config(folder))
    validate_teacher(teacher, describe_model(read_hf_config(policy)), config.trainer)
    longest = _longest_sequence(config)
    if longest > teacher.max_positions:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_response_tokens = {longest} is above the "
            f"max_position_embeddings = {teacher.max_positions} of {PATH_KEY}"
        )
    own, other = (
        read_tokenizer(str(path), key=key).get_vocab()
        for key, path in (("model.path", policy), (PATH_KEY, folder))
    )
    for token in sorted(own.keys() | other.keys()):
        if own.get(token) != other.get(token):
            raise ConfigError(
                f"{PATH_KEY} = {folder} and model.path = {policy} have different tokenizers: "
                f"{token!r} is token {other.get(token)} there and {own.get(token)} here; a teacher "
                "reads the policy's tokens"
            )


def check_teacher_server(config: RunConfig, url: str, policy: Path) -> None:
    """Check that the server answers and reads the policy's tokens.

    Raises:
        ConfigError: its tokenizer or its longest sequence does not fit, or it is no vLLM server.
        DataError: the policy has no tokenizer.
        InfraError: it does not answer.
    """
    tokenizer = read_tokenizer(str(policy))
    TeacherServer(url, retries=RETRIES).check(
        lambda ids: str(tokenizer.decode(ids)),
        sorted(tokenizer.get_vocab().values()),
        longest=_longest_sequence(config),
    )


def _longest_sequence(config: RunConfig) -> int:
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens
