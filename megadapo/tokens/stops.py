"""The tokens at which a response ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from megadapo.errors import DataError
from megadapo.tokens.chat import ASSISTANT, chat_text
from megadapo.tokens.encoder import encoder_of, unused_marks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def stop_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end a response, first the one that ends the answers of training data.

    They are the end of an assistant's turn, the tokenizer's end-of-sequence token, and those of
    generation_config.json, or config.json without it, in the tokenizer's folder.
    """
    ends = (turn_end(tokenizer), getattr(tokenizer, "eos_token_id", None))
    return tuple(
        dict.fromkeys([*(end for end in ends if end is not None), *ends_of_folder(tokenizer)])
    )


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the control token that the chat template writes after an answer.

    None without a template, or if it ends answers in another way.
    """
    encoder = encoder_of(tokenizer)
    if encoder is None or not tokenizer.chat_template:
        return None
    [mark] = unused_marks(1, str(tokenizer.chat_template))
    chat = (("user", "0"), (ASSISTANT, mark))
    try:
        text = chat_text(chat, tokenizer, add_generation_prompt=False)
    except jinja2.TemplateError:
        return None
    _, found, rest = text.rpartition(mark)
    end = encoder.any_control.match(rest.lstrip()) if found else None
    return encoder.controls[end[0]] if end is not None else None


def without_end(token_ids: list[int], stops: tuple[int, ...]) -> list[int]:
    """Return the tokens of a response without the one that ends it, which is not its text."""
    return token_ids[:-1] if token_ids and token_ids[-1] in stops else token_ids


def ends_of_folder(tokenizer: PreTrainedTokenizerBase) -> Iterator[int]:
    """Yield the end-of-sequence tokens in the model's configuration, as vLLM reads it."""
    from transformers.utils.hub import cached_file

    name = getattr(tokenizer, "name_or_path", "")
    for file in ("generation_config.json", "config.json") if name else ():
        try:
            path = cached_file(name, file)
        except OSError:  # the folder or the Hub has no such file
            continue
        if path is None:
            continue
        try:
            config = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path} is not JSON: {error}") from error
        found = config.get("eos_token_id") if isinstance(config, dict) else None
        ends = found if isinstance(found, list) else [found] if found is not None else []
        if not all(type(end) is int for end in ends):
            raise DataError(f"{path}: eos_token_id is {found!r:.200}, not a token's id")
        yield from ends
        return
