"""Conversion of a GGUF file, llama.cpp's format, into a Hugging Face folder."""

from __future__ import annotations

import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from megadapo.errors import ConfigError, DataError
from megadapo.weights.disk.export import check_new, new_folder

EXTRA = ("accelerate", "gguf")
"""Packages that transformers needs to read a GGUF file, in megadapo's extra `gguf`."""
UNREADABLE = (OSError, ValueError, LookupError, NotImplementedError, RuntimeError, struct.error)
"""Errors of transformers on files that are damaged, or of an unknown architecture."""
SPLIT_KEY = "tokenizer.ggml.pre"
"""Name of the rule by which a byte-level tokenizer splits text before it merges."""
COMMON_SPLITS = ("default", "gpt-2")
"""Names of GPT-2's own rule."""


def gguf_to_hf(source: Path, destination: Path) -> None:
    """Write the model and tokenizer of a GGUF file as a Hugging Face folder in fp32.

    Quantised weights get the values that they stand for. The folder gets its name when it is
    complete.

    Raises:
        ConfigError: The packages of the extra `gguf` are not installed.
        DataError: transformers cannot read the file, or not its tokenizer's rule.
        WeightError: The destination exists.
    """
    if missing := [name for name in EXTRA if find_spec(name) is None]:
        raise ConfigError(
            f"{source}: GGUF files need {' and '.join(missing)}: pip install 'megadapo[gguf]', "
            "or in this repository pip install --no-deps -r requirements/real.lock"
        )
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    check_new(destination)
    folder, file = source.absolute().parent, source.name
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=file,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    except UNREADABLE as error:
        raise DataError(f"{source}: transformers cannot read this GGUF file: {error}") from error
    rule = GGUFReader(source).get_field(SPLIT_KEY)
    set_split(tokenizer, None if rule is None else str(rule.contents()), source)
    tokenizer.model_max_length = model.config.max_position_embeddings
    # the name of the training run, which transformers would write as the model's path
    model.config.__dict__.pop("_model_name_or_path", None)
    with new_folder(destination) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        for path in partial.glob("*.safetensors"):
            # safetensors makes files private to the user, but another user may serve the model
            path.chmod((partial / "config.json").stat().st_mode)


def set_split(tokenizer: Any, rule: str | None, source: Path) -> None:
    """Give a tokenizer the split rule that the file names, where transformers did not.

    A wrong rule is silent: texts come back whole, but as other ids than the model was trained on.
    """
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    split = backend.pre_tokenizer
    if not isinstance(split, pre_tokenizers.ByteLevel) or rule in (None, *COMMON_SPLITS):
        return
    if rule != "smollm":
        raise DataError(
            f"{source}: its tokenizer splits text by the rule {rule!r}, which this version of "
            "transformers does not know; convert from the model's safetensors and tokenizer.json"
        )
    # each digit is alone, so that blanks and line ends before a number are merged
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
