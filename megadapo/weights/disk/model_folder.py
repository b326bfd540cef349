"""The check of a Hugging Face model folder before anything starts, which reads headers alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megadapo.errors import DataError, MegadapoError, WeightError
from megadapo.models.description import (
    ModelDescription,
    describe_critic,
    describe_model,
    describe_stored,
)
from megadapo.models.folder import read_hf_config
from megadapo.tokens.tokenizer import check_vocabulary, read_tokenizer
from megadapo.weights.disk.files import CARRIED, files_within
from megadapo.weights.disk.headers import check_headers, read_headers
from megadapo.weights.layout.layout import ModelLayout

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")
"""Files with a vocabulary, one of which a folder needs."""


def check_model_folder(
    folder: Path,
    *,
    where: str,
    as_critic: bool = False,
    with_weights: bool = True,
    with_tokenizer: bool = True,
) -> tuple[ModelDescription, list[str]]:
    """Check the configuration, the headers of the weights and the tokenizer of a folder.

    Return the policy or critic that is made of it, and notes about files that are not read. Raise
    an error of the first problem's type that lists all problems.

    Args:
        where: the folder as errors name it.
        as_critic: whether a critic is made of the model, which may be a critic already.
    """
    problems: list[MegadapoError] = []
    notes: list[str] = []
    model, hf_config = None, read_hf_config(folder)
    try:
        model = describe_critic(hf_config) if as_critic else describe_model(hf_config)
    except MegadapoError as error:
        problems.append(error)
    checks = [partial(_check_weights, folder)] * with_weights
    # transformers makes a tokenizer of config.json too
    checks += [partial(_check_tokenizer, folder)] * (with_tokenizer and model is not None)
    for check in checks:
        try:
            notes += check(model)
        except MegadapoError as error:
            problems.append(error)
    if model is None or problems:
        lines = [line for problem in problems for line in str(problem).splitlines()]
        named = [line if str(folder) in line else f"{where}: {line}" for line in lines]
        raise type(problems[0])("\n".join(named))
    return model, notes


def _check_weights(folder: Path, model: ModelDescription | None) -> list[str]:
    headers = read_headers(folder)
    if model is not None:
        stored = describe_stored(read_hf_config(folder))
        check_headers(headers, ModelLayout(stored.family, stored.shape))
    return headers.notes


def _check_tokenizer(folder: Path, model: ModelDescription | None) -> list[str]:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise DataError(f"no tokenizer ({', '.join(TOKENIZER_FILES)})")
    tokenizer = read_tokenizer(str(folder))
    if model is not None:
        check_vocabulary(tokenizer, model.shape.vocab_size)
    try:
        list(files_within(folder, CARRIED))
    except WeightError as error:
        return [str(error)]
    return []
