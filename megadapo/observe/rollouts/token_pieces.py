"""What each token of a response adds to its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_WINDOW = 64
"""Tokens that are decoded at once: after so many without a whole character at the end, a model
writes no text, and decoding all of them again for each further one would take quadratic time."""
_UNFINISHED = "\ufffd"
MAX_UNFINISHED = 3
"""Replacement characters at an end that may still become a character: one a byte at most."""

Decode = Callable[[Sequence[int]], str]


def decoder_of(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Return how the tokenizer decodes, without special tokens and without changing spaces."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # a tenth of the time of the tokenizer's own decode
        return cast(Decode, partial(backend.decode, skip_special_tokens=True))

    def decode(token_ids: Sequence[int]) -> str:
        text = tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str), "one list of tokens is one text"
        return text

    return decode


def token_pieces(decode: Decode, token_ids: Sequence[int], text: str) -> tuple[str, ...]:
    """Return as many strings as tokens, which joined are `text` where decoding goes on to append.

    A token that ends inside of a character adds "", and the one that completes it the character.
    What a token adds is decoded behind the tokens before it, as a space can depend on them.
    """
    pieces: list[str] = []
    context = begin = 0  # tokens from `context` are decoded; the text of those to `begin` is shown
    num_shown = 0
    for end, _ in enumerate(token_ids, start=1):
        whole = decode(token_ids[context:end])
        stable = _without_unfinished(whole)
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


def _without_unfinished(text: str) -> str:
    for _ in range(MAX_UNFINISHED):
        text = text.removesuffix(_UNFINISHED)
    return text
