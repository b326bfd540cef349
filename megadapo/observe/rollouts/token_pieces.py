"""The text that each token of a response adds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_WINDOW = 64
"""Largest number of tokens decoded at once.

After so many tokens without a complete character the output is not text, and decoding all of them
again for each further token would take quadratic time."""
_UNFINISHED = "\ufffd"
MAX_UNFINISHED = 3
"""Largest number of trailing replacement characters that may become one character."""

Decode = Callable[[Sequence[int]], str]


def decoder_of(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Return a function that decodes tokens, without special tokens and with spaces unchanged."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # takes a tenth of the time of tokenizer.decode
        return cast(Decode, partial(backend.decode, skip_special_tokens=True))

    def decode(token_ids: Sequence[int]) -> str:
        text = tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str), "one list of tokens is one text"
        return text

    return decode


def token_pieces(decode: Decode, token_ids: Sequence[int], text: str) -> tuple[str, ...]:
    """Return one string per token; joined they are `text`, if decoding only appends.

    A token that ends inside a character adds "", and the token that completes it the character.
    Each token is decoded together with the tokens before it, because spaces can depend on them.
    """
    pieces: list[str] = []
    context = begin = 0  # tokens from `context` on are decoded; text up to `begin` is emitted
    num_shown = 0
    for end, _ in enumerate(token_ids, start=1):
        whole = decode(token_ids[context:end])
        stable = whole
        for _ in range(MAX_UNFINISHED):
            stable = stable.removesuffix(_UNFINISHED)
        pieces.append(stable[num_shown:])
        num_shown = max(num_shown, len(stable))
        if len(stable) == len(whole):
            context, begin = begin, end
            num_shown = len(decode(token_ids[context:begin]))
        elif end - context == MAX_WINDOW:
            pieces[-1] += whole[num_shown:]
            context = begin = end
            num_shown = 0
    joined = "".join(pieces)
    if pieces and text.startswith(joined):
        pieces[-1] += text[len(joined) :]
    return tuple(pieces)
