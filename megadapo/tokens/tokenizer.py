"""Loading of a model's tokenizer, with a check that it keeps texts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from megadapo.errors import ConfigError, DataError
from megadapo.tokens.encoder import encoder_of
from megadapo.tokens.stops import stop_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TemplateValue = bool | int | float | str
"""A value that a chat template can read."""
PROBE = "And 4+4? def f(x):\n    return x"
"""A text that every tokenizer must give back."""


def read_tokenizer(
    path: str,
    *,
    key: str = "model.path",
    chat_template_kwargs: Mapping[str, TemplateValue] | None = None,
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model's folder or Hub name.

    Args:
        key: name of `path` for errors.
        chat_template_kwargs: variables that its chat template reads; the template that the
            tokenizer has afterwards sets them.

    Raises:
        DataError: it has no usable tokenizer.
        ConfigError: the tokenizer changes texts, or the template does not read a variable.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        # a boundary: on damaged files the libraries raise what their code happens to meet
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{key} = {path} has no usable tokenizer: {reason:.2000}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ConfigError(
            f"{key} = {path} has the tokenizer {type(tokenizer).__name__}, which is not a fast "
            "one: add its tokenizer.json"
        )
    _check_texts(tokenizer, f"{key} = {path}")
    if chat_template_kwargs:
        _set_variables(tokenizer, chat_template_kwargs, f"{key} = {path}")
    return tokenizer


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Compare the tokens that a text, the chat template or a stop can have with a model's rows.

    The trainer pads the vocabulary, so that such a token would train a row that no export has.

    Raises:
        DataError: a token is not below `vocab_size`.
    """
    encoder = encoder_of(tokenizer)
    special = set() if encoder is None else encoder.special
    kept = {tokenizer.bos_token, tokenizer.eos_token}
    template = str(tokenizer.chat_template)
    names = {name: one for name, one in tokenizer.get_vocab().items() if one >= vocab_size}
    # a special token that no template writes, such as one for padding, is in no batch
    wrong = [
        f"{name} ({one})"
        for name, one in names.items()
        if name not in special - kept or name in template
    ]
    wrong += [f"stop token {one!r}" for one in stop_ids(tokenizer) if not 0 <= one < vocab_size]
    if wrong:
        more = f" and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise DataError(
            f"tokens beyond the model's vocab_size = {vocab_size}: {', '.join(wrong[:10])}{more}; "
            "use the model's own tokenizer and generation_config.json, or give it rows for them"
        )


def _check_texts(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise ConfigError if a text changes by encoding and decoding."""
    letters = {letter for letter in PROBE if not letter.isspace()}
    known = {letter for letter in letters if _round_trip(letter, tokenizer) == letter}
    if known and known != letters:
        # the small vocabulary of a toy task
        return
    found = _round_trip(PROBE, tokenizer)
    if found != PROBE:
        raise ConfigError(
            f"the tokenizer of {name} changes texts: {PROBE!r} becomes {found!r}. It was loaded as "
            f"{type(tokenizer).__name__}, by model_type in config.json or tokenizer_class in "
            "tokenizer_config.json. If the folder's tokenizer.json is right, set tokenizer_class "
            'in tokenizer_config.json to "PreTrainedTokenizerFast", which takes it as it is'
        )


def _round_trip(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return cast(str, tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _set_variables(
    tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, TemplateValue], name: str
) -> None:
    """Have the chat template set its variables, so that all renderings of a run have them."""
    template = tokenizer.chat_template
    for variable in variables:
        if not re.search(rf"\b{re.escape(variable)}\b", str(template or "")):
            raise ConfigError(
                f"data.chat_template_kwargs.{variable}: the chat template of {name} does not read "
                "it; correct the name or leave it out"
            )
    # the empty text keeps a newline at the template's beginning
    head = "".join(
        f"{{% set {variable} = {json.dumps(value, ensure_ascii=False)} %}}{{{{ '' }}}}"
        for variable, value in variables.items()
    )
    if isinstance(template, dict):
        tokenizer.chat_template = {key: head + text for key, text in template.items()}
    else:
        tokenizer.chat_template = head + str(template)
